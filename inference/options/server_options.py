"""The options of the command `python -m inference.serve`, and the mistakes in them that are found without JAX.

`refuse` runs before the imports of the command, which take seconds. Imports no JAX.
"""

import argparse
import pathlib
import sys

from models import config as config_lib
from models import hub
from sharding.system import atomic_file, cli, sockets
from sharding.weights.format import journal

DTYPES = config_lib.CHOICES["dtype"]
START_S = 3600.0  # how long to wait for the first version: a learner loads a large checkpoint before it
HEADS = ("head.jsonl", "epoch.jsonl")  # files of published weights
# Options of the engine with their defaults, which the sizes that a run publishes with its weights replace.
SIZES = {
    **{"num_slots": 64, "max_model_len": 1024, "prefill_batch": 16, "prefill_chunk": 512, "steps_per_call": 8},
    "routed_experts": False,  # record the experts of each token, for router replay
    "num_pages": -1,  # of a cache in pages of 64 tokens that all slots share; -1: chosen (engine.AUTO)
    "page_dtype": "",  # "float8_e4m3fn": pages hold twice the tokens, and the policy changes slightly
    "kept_tokens": 0,  # record up to so many tokens that filters kept, for training under top-k or top-p
}


def refuse(description: str | None) -> None:
    """Exits with a line for a mistake in the command line of this process, and after --help. Names a folder whose weights are not there yet."""
    try:
        args = parse(None, description)
        check(args)
        for folder in () if args.exit_with_parent else _folders(args):  # a parent knows when it publishes
            if not (_has_versions(folder) or _has_versions(folder / "weights")):
                lacks = "has no published version" if folder.exists() else "does not exist"
                cli.note(
                    f"--weights {folder} {lacks} yet: the server waits for up to {START_S:g} s until a run publishes there"
                )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def parse(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    """Returns the options of a command line (None: of this process). Exits with code 2 if argparse rejects it."""
    parser = cli.Parser(prog="python -m inference.serve", description=description)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    helps = "the weight broadcast: a directory, a run's working directory, a bucket URL, or URLs of relays (several: --weights_key)"
    add("--weights", nargs="+", help=helps)
    add("--model", help="a Hugging Face folder (config.json, safetensors, tokenizer.json), a GGUF file, or a hub ID")
    add = parser.add_argument
    add("--weights_key", help="hex of the public key that must have signed the weights, or its root file")
    add("--weights_floor", metavar="FILE", help="keeps the newest signed head, also across restarts")
    add("--weights_allow", nargs="+", default=[], metavar="PREFIX", help="sources that updates may name besides")
    add("--orchestrator", metavar="URL", help="sign in at this orchestrator with --key, and follow its policies")
    helps = "public key (hex) of the run of --orchestrator (default: the first that answers), and of --key"
    add("--run", default="", help=helps)
    add("--url", help="URL at which workers reach this server, for --orchestrator (default: that of --host and --port)")
    add("--expected", metavar="FILE", help="JSON metadata that the weights will have, to compile before they exist")
    add("--key", metavar="FILE", help="key that signs samples, created if absent; its public half is printed")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8100, help="0 takes a free port")
    add("--grpc_port", type=int, help="port of JetStream's gRPC service; 0 takes a free one (default: none)")
    add("--address_file", help="file to write the URL to once the server answers")
    add("--served_model_name", default="policy", help="the model's ID in /v1/models")
    add("--api_key_file", help="file with the key required of every client (default: $INTELLAX_API_KEY, or none)")
    add("--api_key", help="the key itself, which every user of this machine can then read (ps)")
    add("--control", default="", metavar="PATH|HOST:PORT", help="control listener (default: a private unix socket)")
    add("--control_token_file", help="token required of control clients, created if absent; HOST:PORT needs one")
    helps = "names that HOST:PORT is called by (Host header)"
    add("--control_hosts", nargs="+", default=[], metavar="NAME", help=helps)
    for name, default in SIZES.items():
        helps = f"of the engine (default: that of the run which published the weights, else {default})"
        kind: dict = {"action": argparse.BooleanOptionalAction} if default is False else {"type": type(default)}
        add(f"--{name}", **kind, help=helps)
    helps = "JSON of variables for the chat template of requests that do not set them, as in chat_template_kwargs"
    add("--chat_template_kwargs", type=cli.json_object, default={}, metavar="JSON", help=helps)
    add("--max_queue", type=int, default=4096, help="maximum of pending requests; further ones get status 429")
    add("--prefix_cache_mib", type=int, default=256, help="memory for the prefix cache; 0 disables it")
    add("--mesh", default="", help="mesh axes over all devices, such as tensor=4,data=-1 (default: one device)")
    helps = "HOST:PORT of host 0 of a server over several hosts, or auto to find it (TPU pods, Slurm); needs --mesh"
    add("--coordinator", default="", help=helps)
    add("--num_processes", type=int, default=0, help="number of hosts of --coordinator")
    add("--process_id", type=int, default=-1, help="number of this host; host 0 has the routes")
    add("--workdir", help="directory that the hosts share, with the key by which they know each other")
    helps = "int8: half the bytes, and faster on a CPU; int4 (on a CPU): a third, slower and less exact. Both change the policy"
    add("--quantize", default="none", choices=config_lib.QUANTIZATIONS, help=helps)
    helps = "of the weights and activations of --model: float32 or bfloat16 (default: the folder's, on a CPU the faster one)"
    add("--dtype", default="auto", help=helps)
    helps = "an adapter (LoRA) in a folder that PEFT or rl.export --adapter_only wrote; requests name it as their model. May be repeated"
    add("--adapter", action="append", default=[], metavar="NAME=FOLDER", help=helps)
    helps = "adapters at a time (default: those given, or 4 if more may be loaded)"
    add("--max_adapters", type=int, default=0, help=helps)
    add("--max_adapter_rank", type=int, default=16, help="the highest rank of an adapter")
    helps = "control clients may load and unload adapters (/v1/load_lora_adapter), from any folder that this process can read"
    add("--allow_adapter_loading", action="store_true", help=helps)
    add("--warm_up", action="store_true", help="compile for prompts of every length before listening")
    add("--watch", type=float, default=0.0, metavar="SECONDS", help="poll for newer weights at this interval")
    add("--profile", default="", metavar="FOLDER", help="record the engine's work for xprof there, in --profile_steps")
    helps = "the first and last train step, after those before whose versions are in use"
    add("--profile_steps", type=int, nargs=2, default=(), metavar=("FIRST", "LAST"), help=helps)
    add("--drain_s", type=int, default=30, help="seconds that running requests get on SIGTERM")
    add("--exit_with_parent", action="store_true", help="stop when standard input closes")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for options that contradict each other, and for a folder of --weights that a run does not publish to."""
    smallest = dict(max_queue=1, prefix_cache_mib=0, watch=0, drain_s=0, max_model_len=2)
    for name, least in smallest.items():
        if getattr(args, name) is not None and not getattr(args, name) >= least:
            raise ValueError(f"--{name} = {getattr(args, name)} is too small; choose {least} or more")
    if bool(args.profile) != bool(args.profile_steps):
        raise ValueError("--profile and --profile_steps belong together; give both, or neither")
    if args.grpc_port is not None and not 0 <= args.grpc_port <= 65535:
        raise ValueError(f"--grpc_port = {args.grpc_port} is not a port; choose 0 to 65535")
    if args.address_file and not pathlib.Path(args.address_file).parent.is_dir():
        raise ValueError(f"--address_file {args.address_file} is in a directory that does not exist; create that first")
    if args.weights_floor and not args.weights_key:
        raise ValueError(f"--weights_floor {args.weights_floor} keeps signed heads; add --weights_key, or leave it out")
    for name in ("orchestrator", "url"):
        if (url := getattr(args, name)) and not sockets.is_url(url):
            raise ValueError(f"--{name} {url!r} is not a URL; write http://HOST:PORT")
    if args.orchestrator and not (args.key and args.weights):
        found = f"--orchestrator {args.orchestrator} needs --key, by which a server signs in, and --weights"
        missing = {"--key FILE": args.key, "--weights SOURCE": args.weights}
        raise ValueError(f"{found}; add {' and '.join(name for name, value in missing.items() if not value)}")
    if args.key and not (args.orchestrator or args.run):
        raise ValueError(f"--key {args.key} signs samples for one run; add --run with the run's public key")
    if args.dtype not in ("auto", *DTYPES):
        raise ValueError(f"--dtype {args.dtype} is unknown; choose auto, {' or '.join(DTYPES)}")
    if args.dtype != "auto" and args.weights:
        found = f"--dtype {args.dtype} is for --model, and published weights keep the dtype of their run"
        raise ValueError(f"{found}; leave it out")
    if args.weights and (args.adapter or args.allow_adapter_loading):
        raise ValueError(
            "--adapter needs --model, because published weights bring their own adapters; leave out --adapter or --weights"
        )
    if args.model and (args.weights_key or args.watch):
        name = "weights_key" if args.weights_key else "watch"
        raise ValueError(f"--{name} applies to a broadcast, and --model is a folder; leave it out, or serve --weights")
    for folder in _folders(args):
        _check_folder(folder)


def is_run(folder: pathlib.Path) -> bool:
    """Returns True for a run's working directory, which may have published nothing yet."""
    return (folder / "weights").is_dir() or "config" in atomic_file.read_json(folder / "config.json", dict)


def _folders(args: argparse.Namespace) -> list[pathlib.Path]:
    return [pathlib.Path(source) for source in args.weights or () if not hub.is_url(source)]


def _has_versions(folder: pathlib.Path) -> bool:
    """Returns True for a folder with weights that a run has published, or begins to publish."""
    return folder.is_dir() and any(
        one.name in HEADS or journal.parse_dirname(one.name) is not None for one in folder.iterdir()
    )


def _check_folder(folder: pathlib.Path) -> None:
    """Raises ValueError for a folder of other things. A run may still make one that is absent or empty."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--weights {folder} is a file; give the working directory of a run, or serve it by --model")
    names = {one.name for one in folder.iterdir() if not one.name.startswith(".")} if folder.is_dir() else ()
    if not names or _has_versions(folder) or is_run(folder):
        return
    found = f"--weights {folder} has no weights/ of a run, and no published version such as {journal.dirname(0)}/"
    is_model = "config.json" in names or any(name.endswith(".safetensors") for name in names)
    remedy = f"serve it by --model {folder}" if is_model else "give the working directory of a run, or its weights/"
    raise ValueError(f"{found}; {remedy}")
