"""The commands of `python -m rl.envs` for packages of environments: check, init, list, info, install, publish.

Each function returns the exit code: 0, or 1 if an environment or a report does not pass. They raise ValueError and OSError for mistakes of
the user.
"""

import json
import pathlib
import sys
import time
from importlib import metadata

from inference.rollouts import rollout as rollout_lib
from rl.envs.catalog import catalog
from rl.envs.hub import admission, rules, skeleton, store, trial
from rl.envs.hub import index as index_lib
from rl.envs.hub import report as report_lib
from rl.envs.interface import environment
from rl.envs.packages import installation
from rl.envs.packages import package as package_lib
from rl.protocol.ledger import environments
from sharding.system import cli
from sharding.system import text as text_lib


def add_check(commands) -> None:
    """Adds the command `check` to a parser's commands."""
    parser = commands.add_parser("check", help="test an environment for faults, and write a signed report")
    add = parser.add_argument
    helps = "as config.env.name: a shipped one, module:function, or path/to/file.py:function"
    add("name", nargs="?", default="", help=helps)
    add("options", nargs="*", metavar="OPTION=VALUE", help="as config.env.options")
    add("--tasks", type=int, default=trial.Plan.tasks, help="tasks of each split that are made in two processes")
    add("--scored", type=int, default=trial.Plan.scored, help="tasks of which completions are scored")
    add("--episodes", type=int, default=trial.Plan.episodes, help="random answers or episodes of each scored task")
    add("--floor", type=float, default=rules.FLOOR, help="largest mean reward of completions that answer nothing")
    add("--timeout_s", type=float, default=trial.Plan.timeout_s, help="seconds after which a trial fails")
    add("--seed", type=int, default=0, help="as config.seed")
    add("--code", **cli.FOLDERS, help="folders to import your code from")
    add("--report", metavar="FILE", help="write the report as JSON, signed by --key")
    add("--key", metavar="FILE", help="PEM file with the key that signs the report; created if it does not exist")
    add("--json", action="store_true", help="print the report as JSON")
    helps = "check the signature and verdict of a report; with NAME, also that its digest is that of NAME here"
    add("--verify", metavar="REPORT", help=helps)
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
    begun_s = time.monotonic()
    report = admission.check(
        plan,
        floor=args.floor,
        code=tuple(args.code),
        on_stage=lambda stage: cli.note(f"{time.monotonic() - begun_s:6.1f} s  {stage}"),
    )
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


def add_packages(commands) -> None:
    """Adds the commands init, list, info, install, and publish to a parser's commands."""
    parser = commands.add_parser("init", help="make a package with an environment, its manifest, and its test")
    parser.add_argument("name", help="of the environment and its package")
    parser.add_argument("--folder", help="where; default: NAME")
    parser.set_defaults(run=_init)
    parser = commands.add_parser("list", help="list the environments that are installed, or those of an index")
    _add_index(parser)
    parser.set_defaults(run=_list)
    parser = commands.add_parser("info", help="describe an environment that is installed, or one of an index")
    parser.add_argument("name", help="as config.env.name, or, with --index, NAME or NAME@VERSION")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="as config.env.options")
    parser.add_argument("--code", **cli.FOLDERS, help="folders to import your code from")
    text = "of a run (WORKDIR/ledger.db): print the environment's reputation in it"
    parser.add_argument("--ledger", metavar="DB", help=text)
    _add_index(parser)
    parser.set_defaults(run=_info)
    parser = commands.add_parser(
        "install", help="install an environment of an index, after verifying its wheel and report"
    )
    frameworks = "verifiers:PACKAGE[@VERSION], openenv:MODULE:CLASS, plain:MODULE:FUNCTION"
    parser.add_argument("name", help=f"NAME or NAME@VERSION of an index, or {frameworks}")
    parser.add_argument("--target", metavar="FOLDER", help="a folder for --code, in place of this interpreter")
    parser.add_argument("--dry", action="store_true", help="verify only")
    _add_index(parser)
    _add_framework_options(parser)
    parser.set_defaults(run=_install)
    parser = commands.add_parser("publish", help="add a package to an index")
    parser.add_argument("folder", help="with pyproject.toml")
    parser.add_argument("--index", required=True, metavar="FILE", help="of the index; created if it does not exist")
    parser.add_argument("--key", required=True, metavar="FILE", help="PEM file with the key that signs the index")
    parser.add_argument("--report", required=True, metavar="FILE", help="of `check`, which passed on this code")
    parser.add_argument("--wheel", metavar="FILE", help="of this package, if it is built; default: build it")
    parser.set_defaults(run=_publish)


def _add_index(parser) -> None:
    parser.add_argument("--index", metavar="PLACE", help="path or URL of a signed index")
    parser.add_argument("--signer", default="", metavar="HEX", help="public key that must have signed the index")


def _add_framework_options(parser) -> None:
    group = parser.add_argument_group("environments of other frameworks, each in an interpreter of its own")
    add = group.add_argument
    add("--requirement", nargs="+", default=[], metavar="REQ", help="for pip (default: PACKAGE==VERSION)")
    add(
        "--python",
        default=sys.executable,
        help="interpreter to use; with requirements, the base of a new virtual environment",
    )
    add("--path", nargs="+", default=[], metavar="FOLDER", help="further folders to import the environment from")
    add("--variable", nargs="+", default=[], metavar="NAME=VALUE", help="environment variables of its process")
    add("--kind", choices=environment.KINDS[1:], default="replayed", help="recorded: it depends on a clock or the web")


def _init(args, options: dict) -> int:
    files = skeleton.write(args.name, pathlib.Path(args.folder or args.name))
    print("\n".join(map(str, files)))
    print(
        f"next: python -m rl.envs check {args.name}:build --code {args.folder or args.name} --report report.json --key key.pem"
    )
    return 0


def _list(args, options: dict) -> int:
    if not args.index:
        for name in catalog.ENVS:
            print(f"{name:<24} shipped")
        for entry in metadata.entry_points(group=catalog.GROUP):
            print(
                f"{entry.name:<24} {entry.dist.name if entry.dist else 'installed'} {entry.dist.version if entry.dist else ''}"
            )
        for name in package_lib.names():
            print(f"{name:<24} in an interpreter of its own")
        return 0
    found = index_lib.read(args.index, args.signer)
    for name in sorted(found.environments):
        version, entry = found.entry(name)
        print(f"{name:<24} {version:<10} {entry['kind']:<9} {text_lib.printable(entry['summary'])}")
    print(f"{len(found.environments)} environments, signed by {found.signer}")
    return 0


def _info(args, options: dict) -> int:
    if args.index:
        found = index_lib.read(args.index, args.signer)
        name, _, wanted = args.name.rpartition("/")[2].partition("@")
        version, entry = found.entry(name, wanted)
        shown = {"version": version} | entry | {"versions": [*found.environments[name]], "signer": found.signer}
    else:
        located, given = catalog.locate(args.name, options)
        env = catalog.load(args.name, **options)
        shown = {"kind": env.kind, "calls": "several" if env.play else "one", "reward": list(env.reward_range)}
        shown |= {"training tasks": env.num_tasks or "unlimited", "digest": catalog.digest(located, given)}
    for field, value in shown.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{field:<15} {text_lib.printable(str(text))}")
    if args.ledger:
        found = [one for one in environments.read(args.ledger) if shown["digest"] == one.digest]
        print("\n".join(environments.table(found)) if found else f"{args.ledger} has no batch of this digest")
    return 0


def _install(args, options: dict) -> int:
    if args.name.partition(":")[0] in package_lib.FRAMEWORKS:
        return _install_framework(args)
    if not args.index:
        raise ValueError("--index is missing; pass the path or URL of an index")
    if not args.signer:
        signer = index_lib.read(args.index).signer
        raise ValueError(f"--signer is missing: the index is signed by {signer}; pass this key if you trust its owner")
    found = index_lib.newest(index_lib.read(args.index, args.signer), package_lib.folder() / "indexes.json")
    done = store.install(found, args.name, pathlib.Path(args.target) if args.target else None, dry=args.dry)
    print(f"{'verified' if args.dry else 'installed'} {done}")
    return 0


def _install_framework(args) -> int:
    """Installs an environment of another framework, and prints its interpreter and digest."""
    pairs = [text.partition("=") for text in args.variable]
    if bad := [name for name, is_set, _ in pairs if not is_set or not name.isidentifier()]:
        raise ValueError(f"--variable {bad[0]!r} has no value; write NAME=VALUE")
    variables = {name: value for name, _, value in pairs}
    settings = {"python": args.python, "paths": args.path, "variables": variables, "kind": args.kind}
    found = installation.install(args.name, args.requirement, **settings)
    print(f"{found.name}: {found.python} (Python {found.version}), adapter {found.adapter}, kind {found.kind}")
    print(f"record: {package_lib.record_file(found.name)}; digest without options {package_lib.digest(found, {})}")
    return 0


def _publish(args, options: dict) -> int:
    key = rollout_lib.WorkerKey.load_or_create(args.key)
    wheel = pathlib.Path(args.wheel) if args.wheel else None
    done = store.publish(pathlib.Path(args.folder), pathlib.Path(args.index), key, pathlib.Path(args.report), wheel)
    print(f"published {done}, signed by {key.worker}")
    return 0
