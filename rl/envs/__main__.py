"""Shows and tests environments: `try` prints tasks, the scores of their answers, and lengths; `check` finds faults.

`init`, `list`, `info`, `install`, and `publish` are for packages of environments (rl/envs/hub). `install` also takes environments of other
frameworks (rl/envs/packages).

`try` scores completions as in a run, in a process with limits. For each task these are its own answer, which should get the reward 1, and
an answer of another task, which should get less. An environment of several turns plays an episode with its answer in every message, and
one with random words.
"""

import argparse
import contextlib
import pathlib
import runpy
import statistics
import sys

from models.text import tokenizer as tokenizer_lib
from rl import envs
from rl.envs.foreign import host as foreign_host
from rl.envs.hub import commands as hub_commands
from rl.envs.hub import tryout
from rl.envs.interface import environment
from rl.envs.scoring import scorer as scorer_lib
from rl.protocol import env_mix
from sharding.system import cli
from sharding.system import sandbox as sandbox_lib


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 after an error, which is printed, or 130 after Ctrl-C."""
    parser = cli.Parser(prog="python -m rl.envs", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser(
        "try", help="print tasks of an environment, with scores and lengths in tokens"
    ).add_argument
    helps = "as config.env.name: a shipped one, module:function, or path/to/file.py:function; none with --config"
    add("name", nargs="?", default="", help=helps)
    add("options", nargs="*", metavar="OPTION=VALUE", help="as config.env.options")
    add("--config", metavar="FILE", help="a config file, to try all environments of its run")
    add("--n", type=int, default=5, help="number of tasks")
    add("--split", choices=environment.SPLITS, default="train", help="which tasks")
    add("--seed", type=int, default=0, help="as config.seed")
    helps = "a model, or as config.tokenizer, for the lengths (default: that of --config, else byte_chatml, a token per byte)"
    add("--tokenizer", default="", help=helps)
    add("--sandbox", choices=sandbox_lib.MODES, default="auto", help="as config.trust.sandbox")
    add("--code", **cli.FOLDERS, help="folders to import your code from")
    hub_commands.add_check(commands)
    hub_commands.add_packages(commands)
    return cli.run(parser, argv, _run)


def _run(args) -> int:
    sys.path += getattr(args, "code", [])
    texts = envs.texts(getattr(args, "name", ""))
    options = dict(cli.option(option, texts) for option in getattr(args, "options", []))
    if args.command != "try":
        return args.run(args, options)
    if args.n < 1:
        raise ValueError(f"--n {args.n} is below 1; raise it")
    if bool(args.name) == bool(args.config):
        raise ValueError("give the name of an environment, or --config FILE, and not both")
    return _try_all(args) if args.config else _try(args, options, _tokenizer(args.tokenizer or "byte_chatml"))


def _tokenizer(name: str) -> tokenizer_lib.Tokenizer:
    print(f"lengths are in tokens of {name}; --tokenizer MODEL measures those of another model")
    return tokenizer_lib.load(name, date="2026-01-01")


def _try_all(args) -> int:
    """Tries each environment of a config file, with the fields of its groups."""
    file, _, argument = args.config.partition(":")
    if not pathlib.Path(file).is_file():
        raise ValueError(f"config file {file} does not exist; choose one of configs/ or examples/")
    config = runpy.run_path(file)["get_config"](*[argument] * bool(argument))
    entries, order = env_mix.entries(config), env_mix.order(config)
    tokenizer = _tokenizer(args.tokenizer or config.init_from or config.tokenizer)
    for key, entry in entries.items():
        names = ("samples_per_prompt", "temperature", "max_tokens", "advantage") if key else ()
        shown = "".join(f", {name} {getattr(entry, name)}" for name in names)
        print(f"environment {entry.label}: {entry.name}, {order.count(key)} of {len(order)} groups{shown}")
        with entry.naming_fields():
            _try(argparse.Namespace(**vars(args) | {"name": entry.name, "seed": config.seed}), entry.options, tokenizer)
    return 0


def _try(args, options: dict, tokenizer: tokenizer_lib.Tokenizer) -> int:
    envs.locate(args.name, options)  # raises for an option that is none
    env = envs.load(args.name, seed=args.seed, **options)
    count = min(args.n, env.num_tasks or args.n)  # then the tasks repeat
    tasks = [env.make_task(index, args.split) for index in range(count)]
    if env.play is not None:
        return _try_episodes(args, options, env, tasks, tokenizer)
    others = [*tasks[1:], env.make_task(count, args.split)]
    prompts, answers, num_echoed = [], [], 0
    rewards = {"its answer": [], "the answer of the next task": []}
    scorer = scorer_lib.Scorer(args.name, options, args.seed, limit_s=scorer_lib.LIMIT_S, sandbox=args.sandbox)
    with contextlib.closing(scorer):
        for task, other in zip(tasks, others, strict=True):
            prompts.append(len(tokenizer.render(task.messages, add_generation_prompt=True).token_ids))
            answers.append(len(tokenizer.encode(task.answer)))
            print(f"task {task.index} ({task.split}): {prompts[-1]} tokens, its answer {answers[-1]}")
            for role, text in [*((m["role"], m["content"]) for m in task.messages), ("answer", task.answer)]:
                print(f"  {role}: {text}".replace("\n", "\n    "))
            scored = scorer.score(task, [task.answer, other.answer, *environment.echoes(task)])
            most = max(one.scores["reward"] for one in scored[2:])
            num_echoed += most > 0 and most >= scored[0].scores["reward"]
            for (completion, found), one in zip(rewards.items(), scored, strict=False):
                found.append(one.scores["reward"])
                print(f"  scores of {completion}: {_numbers(one.scores)} ({1000 * one.cpu_s:.0f} ms)")
    print(f"{count} tasks; tokens of prompts {_spread(prompts)}, of answers {_spread(answers)}")
    print("; ".join(f"mean reward of {name} {statistics.fmean(found):g}" for name, found in rewards.items()))
    print(f"training tasks: {env.num_tasks or 'unlimited'}; digest {envs.digest(*envs.locate(args.name, options))}")
    if min(rewards["its answer"]) < 1:
        print("warning: an answer gets less than 1, so the task cannot be solved as its author means")
    if num_echoed:
        print(environment.echo_warning(args.name, num_echoed, count))
    return 0


def _try_episodes(args, options: dict, env: environment.Environment, tasks, tokenizer: tokenizer_lib.Tokenizer) -> int:
    name, located = envs.locate(args.name, options)
    limits = {"limit_s": scorer_lib.LIMIT_S, "sandbox": args.sandbox}
    host = foreign_host.of_environment(env, name, located, args.seed, tokenizer, on_error=lambda line: None, **limits)
    played = tryout.play(host, tokenizer, tasks)
    for task, episodes in zip(tasks, played, strict=True):
        for answers, one in episodes.items():
            found = one.result
            print(f"task {task.index} ({task.split}), {answers}: {one.num_calls} calls, {one.num_tokens} tokens")
            for number, text in enumerate(one.texts):
                print(f"  branch {number}: {text}".replace("\n", "\n    "))
            problem = f"; failed: {found.error or 'it exceeded its limits'}" if found.error or not found.in_time else ""
            print(f"  scores: {_numbers(found.scores)} ({1000 * found.cpu_s:.0f} ms of CPU time){problem}")
    flat = [one for episodes in played for one in episodes.values()]
    counts = ([one.num_calls for one in flat], [one.num_tokens for one in flat])
    print(f"{len(flat)} episodes of kind {env.kind!r}; calls {_spread(counts[0])}, tokens {_spread(counts[1])}")
    print(f"training tasks: {env.num_tasks or 'unlimited'}; digest {envs.digest(name, located)}")
    return int(any(one.result.error or not one.result.in_time for one in flat))


def _numbers(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in scores.items())


def _spread(counts: list[int]) -> str:
    return f"{min(counts)} to {max(counts)}"


if __name__ == "__main__":
    sys.exit(main())
