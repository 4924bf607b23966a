"""The commands of `python -m rl.envs` for environments of others: check.

Each function returns the exit code: 0, or 1 if an environment or a report does not pass. They raise ValueError and OSError for mistakes of
the user.
"""

import json
import sys

from inference.rollouts import rollout as rollout_lib
from rl.envs.catalog import catalog
from rl.envs.hub import admission, rules, trial
from rl.envs.hub import report as report_lib


def add_check(commands) -> None:
    """Adds the command `check` to a parser's commands."""
    parser = commands.add_parser("check", help="test an environment for faults, and write a signed report")
    add = parser.add_argument
    add(
        "name",
        nargs="?",
        default="",
        help="as config.env.name: a shipped one, module:function, or path/to/file.py:function",
    )
    add("options", nargs="*", metavar="OPTION=VALUE", help="as config.env.options")
    sizes = {
        name: default for name, default in vars(trial.Plan("", {})).items() if name in ("tasks", "scored", "episodes")
    }
    add("--tasks", type=int, default=sizes["tasks"], help="tasks of each split that are made in two processes")
    add("--scored", type=int, default=sizes["scored"], help="tasks of which completions are scored")
    add("--episodes", type=int, default=sizes["episodes"], help="random answers or episodes of each scored task")
    add("--floor", type=float, default=rules.FLOOR, help="largest mean reward of completions that answer nothing")
    add("--timeout_s", type=float, default=trial.Plan.timeout_s, help="seconds after which a trial fails")
    add("--seed", type=int, default=0, help="as config.seed")
    add("--code", nargs="+", default=[], metavar="FOLDER", help="folders to import your code from")
    add("--report", metavar="FILE", help="write the report as JSON, signed by --key")
    add("--key", metavar="FILE", help="PEM file with the key that signs the report; created if it does not exist")
    add("--json", action="store_true", help="print the report as JSON")
    add(
        "--verify",
        metavar="REPORT",
        help="check the signature and verdict of a report; with NAME, also that its digest is that of NAME here",
    )
    add("--signer", default="", metavar="HEX", help="with --verify: the public key that must have signed")
    parser.set_defaults(run=check)


def check(args, options: dict) -> int:
    """Runs the admission check of an environment, or verifies a report."""
    if args.verify:
        return _verify(args, options)
    if not args.name:
        raise ValueError("no environment is named; write python -m rl.envs check NAME")
    if args.report and not args.key:
        raise ValueError("--report needs --key, the PEM file of the key that signs it; a new name makes a new key")
    for name in ("tasks", "scored", "episodes", "timeout_s"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} is below 1; raise it")
    sizes = {name: getattr(args, name) for name in ("tasks", "scored", "episodes", "timeout_s")}
    plan = trial.Plan(args.name, options, args.seed, **sizes)
    report = admission.check(plan, floor=args.floor, code=tuple(args.code))
    if args.key:
        report = report_lib.sign(report, rollout_lib.WorkerKey.load_or_create(args.key))
    if args.report:
        report_lib.write(report, args.report)
    print(json.dumps(report, indent=1) if args.json else report_lib.table(report))
    return 0 if report_lib.passed(report) else 1


def _verify(args, options: dict) -> int:
    report = report_lib.read(args.verify, args.signer)
    named = report["environment"]
    if args.name:
        found = catalog.digest(*catalog.locate(args.name, options))
        if found != named["digest"]:
            text = f"{args.name} has the digest {found[:16]} here, and {args.verify} is about {named['digest'][:16]}"
            raise ValueError(f"{text}; check it again with --report")
    print(f"signed by {report['signer']}: {report['verdict']} for {named['name']}, digest {named['digest']}")
    if not report_lib.passed(report):
        print("error: the environment did not pass", file=sys.stderr)
    return 0 if report_lib.passed(report) else 1
