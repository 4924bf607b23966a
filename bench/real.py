"""A real model next to transformers, llama.cpp, and TRL: decoding, a GRPO step, supervised fine-tuning, and the time to a held-out score.

    python -m bench.real --peer_python /venv/bin/python --llama /opt/llama.cpp/llama-server
    python -m bench.real --parts decode --requests 1 --repeats 3

1. The model is SmolLM2-135M-Instruct (tests/support/real_model.py), or `--model FOLDER` and `--gguf FILE`. `--peer_python` is an
   interpreter with transformers and TRL, `--llama` a server of llama.cpp; a peer that is not given is left out.
2. `decode`: 64, 16, and 1 chat requests at a time, prompts of about 50 tokens, 64 new tokens each, temperature 1. Ours is
   `inference.serve --model FOLDER` with its default flags, and with --quantize int8 and int4; transformers' `generate` in both dtypes.
   All are started first, and then take turns, so that a busy machine is busy for all. A first round is not counted.
3. `grpo`: steps of 8 prompts x 8 samples of `rl.train --config=configs/finetune.py`, adapters of rank 16 in every side. The first two
   steps are not counted. `sft`: steps of 32 conversations of `rl.sft`, in the same way.
4. `score`: seconds from the command (ours) or the first step (TRL's, without its evaluations) to a held-out score of 0.8 on sums, and
   ours after the last step. Each turn has its own seed. TRL is stopped after `--patience` times our seconds, which then stand for its own.
5. Medians, their ratios to the best peer, peak memory (of a side's processes together), and the start are printed, and kept in `--out`.

Acceptance, on two idle cores: ratios to the better dtype of transformers of at least 1.3 (64 requests), 1.2 (16), and 1.5 (1); to
llama.cpp of 1.5 (64); seconds to the score at most 0.45 of TRL's, peak memory at most half of it.
"""

import asyncio
import atexit
import collections
import contextlib
import json
import math
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import aiohttp

from sharding.system import cli, sockets

ROOT = pathlib.Path(__file__).resolve().parents[1]
PEER = "bench/real_peer.py"
WORDS = (
    "the river bank shows twelve small boats with red sails near an old stone bridge while children count birds".split()
)
GRPO = {"prompts": 8, "samples": 8, "tokens": 32, "learning_rate": 2e-4, "target": 0.8}
SFT = {"batch": 32, "learning_rate": 2e-4}
UNCOUNTED = 2  # steps


class Side:
    """A process group that is measured: its output goes to a file, and a thread records the peak of its resident memory."""

    def __init__(self, command: list, folder: pathlib.Path, **pipes):
        self.log = folder / f"{len(list(folder.iterdir()))}.log"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.begun, self.peak_bytes = time.perf_counter(), 0
        with self.log.open("w") as log:
            pipes = {"stdout": log, "stderr": log} | pipes
            self.process = subprocess.Popen(
                [*map(str, command)], cwd=ROOT, env=environment, start_new_session=True, text=True, **pipes
            )
        atexit.register(self.end)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            self.peak_bytes = max(self.peak_bytes, _resident_bytes(self.process.pid))
            time.sleep(0.25)

    def end(self) -> None:
        """Ends the process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def check(self, ok: bool) -> None:
        """Raises SystemExit with the end of the output unless `ok`."""
        if not ok:
            self.end()
            raise SystemExit(f"{' '.join(map(str, self.process.args))} failed:\n{self.log.read_text()[-2000:]}")


def _resident_bytes(group: int) -> int:
    total = 0
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()
            total += int(fields[21]) * (int(fields[2]) == group)
    return total * os.sysconf("SC_PAGE_SIZE")


# ---- decoding --------------------------------------------------------------------------------------------------------


class Server(Side):
    """An HTTP server of OpenAI's API."""

    def __init__(self, command: list, folder: pathlib.Path, url: str):
        super().__init__(command, folder)
        self.url = url
        while not asyncio.run(self._is_ready()):
            self.check(self.process.poll() is None and time.perf_counter() - self.begun < 300)
            time.sleep(0.1)
        self.run(["Say hello."], 1)
        self.start_s = time.perf_counter() - self.begun  # to the first token

    async def _is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/v1/models") as reply:
                return reply.status == 200
        return False

    def run(self, prompts: list[str], new: int) -> float:
        """Sends all prompts at the same time; returns the seconds to the last answer."""

        async def ask(session, prompt, seed):
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": new, "temperature": 1.0}
            body |= {"model": "policy", "ignore_eos": True, "seed": seed}
            async with session.post(f"{self.url}/v1/chat/completions", json=body) as reply:
                answer = await reply.json()
                self.check(reply.status == 200 and answer["usage"]["completion_tokens"] == new)

        async def all_at_once():
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:
                await asyncio.gather(*(ask(session, prompt, seed) for seed, prompt in enumerate(prompts)))

        begun = time.perf_counter()
        asyncio.run(all_at_once())
        return time.perf_counter() - begun


class Generator(Side):
    """A process of real_peer.py that generates."""

    def __init__(self, command: list, folder: pathlib.Path):
        super().__init__(command, folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answer()
        self.run(["Say hello."], 1)
        self.start_s = time.perf_counter() - self.begun

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.check(bool(line))
        return json.loads(line)

    def run(self, prompts: list[str], new: int) -> float:
        """Generates for all prompts in one batch; returns the seconds."""
        assert self.process.stdin is not None
        print(json.dumps({"prompts": prompts, "new": new}), file=self.process.stdin, flush=True)
        return self._answer()["seconds"]


def decode(args, model: pathlib.Path, scratch: pathlib.Path) -> dict:
    """Returns the tokens/s of each side by number of requests, its start, and its peak memory."""
    makers = {}

    def serve(*flags):
        port = _port()
        command = [sys.executable, "-m", "inference.serve", "--model", model, "--port", port, *flags]
        return Server(command, scratch, f"http://127.0.0.1:{port}")

    makers["ours"] = serve
    makers["ours int8"] = lambda: serve("--quantize", "int8")
    makers["ours int4"] = lambda: serve("--quantize", "int4")
    if args.peer_python:
        for dtype in ("float32", "bfloat16"):
            command = [args.peer_python, PEER, "generate", model, dtype]
            makers[f"transformers {dtype}"] = lambda command=command: Generator(command, scratch)
    if args.llama:
        port, slots = _port(), max(args.requests)
        command = [args.llama, "-m", args.gguf, "-np", slots, "-c", 1024 * slots, "-t", 2, "-tb", 2, "--port", port]
        makers["llama.cpp"] = lambda: Server([*command, "--no-webui"], scratch, f"http://127.0.0.1:{port}")
    sides, rates = {}, collections.defaultdict(lambda: collections.defaultdict(list))
    try:
        for name in makers:
            if args.sides is None or name in args.sides:
                _note(f"starting {name}")
                sides[name] = makers[name]()
        for count in args.requests:
            for turn in range(args.repeats + 1):
                rng = random.Random(f"{count} {turn}")
                prompts = [f"{' '.join(rng.choices(WORDS, k=20))} Tell a story about {n} cats." for n in range(count)]
                for name, side in sides.items():
                    seconds = side.run(prompts, args.new_tokens)
                    _note(f"{count} requests, turn {turn}: {name} {count * args.new_tokens / seconds:.3g} tokens/s")
                    if turn:
                        rates[count][name].append(count * args.new_tokens / seconds)
        starts = {name: round(side.start_s, 1) for name, side in sides.items()}
        peaks = {name: round(side.peak_bytes / 1e9, 2) for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.end()
    found = {f"{count} requests, tokens/s": _medians(by_side) for count, by_side in rates.items()}
    return found | {"seconds to the first token": starts, "peak memory, GB": peaks}


# ---- training --------------------------------------------------------------------------------------------------------


def grpo(args, model: pathlib.Path, scratch: pathlib.Path) -> dict:
    """Returns the seconds of a GRPO step, and the peak memory."""
    return _trained(args, model, scratch, {"steps": args.steps, "every": 0})


def score(args, model: pathlib.Path, scratch: pathlib.Path) -> dict:
    """Returns the seconds to the held-out score, and those of a GRPO step."""
    return _trained(args, model, scratch, {"steps": 25, "every": 5})


def _trained(args, model: pathlib.Path, scratch: pathlib.Path, more: dict) -> dict:
    data, held_out = scratch / "sums.jsonl", scratch / "held_out.jsonl"
    seconds = f"seconds to a score of {GRPO['target']}"
    rows = [
        {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)}
        for a in range(1, 31)
        for b in range(1, 31)
    ]
    random.Random(0).shuffle(rows)
    for path, part in ((held_out, rows[:64]), (data, rows[64:])):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for turn in range(args.repeats):
        options = GRPO | more | {"seed": args.first_seed + turn}
        _note(f"turn {turn + 1} of {args.repeats}: ours")
        results = {"ours": _our_grpo(model, data, scratch / f"run{turn}", options, scratch)}
        if args.peer_python:
            _note(f"turn {turn + 1} of {args.repeats}: TRL")
            most_s = args.patience * results["ours"].get(seconds, math.inf)
            peer = options | {"dtype": args.trl_dtype, "most_s": most_s}
            command = [args.peer_python, PEER, "grpo", model, data, held_out, json.dumps(peer)]
            results["TRL"] = _peer_training(command, scratch)
        for name, values in results.items():
            _note(f"turn {turn + 1} of {args.repeats}: {name}: {values}")
            for key, value in values.items():
                found[key][name].append(value)
    return {key: _medians(by_side) for key, by_side in found.items()}


def _our_grpo(model, data, workdir, options: dict, scratch: pathlib.Path) -> dict[str, float]:
    fields = {"init_from": model, "env.name": "dataset", "env.options.path": data, "env.options.reward": "number"}
    fields |= {"rl.prompts_per_step": options["prompts"], "rl.samples_per_prompt": options["samples"]}
    fields |= {"sampling.max_tokens": options["tokens"], "optimizer.learning_rate": options["learning_rate"]}
    fields |= {"rl.num_steps": options["steps"], "evaluation.every": options["every"] or 10**6}
    fields |= {"evaluation.num_tasks": 64 if options["every"] else 1, "seed": options["seed"]}
    side = Side(_command("rl.train", workdir, fields), scratch)
    scores, reached = [0.0], None
    while side.process.poll() is None:
        time.sleep(0.25)
        with contextlib.suppress(OSError, ValueError, KeyError):
            scores = [entry["scores"]["avg@1"] for entry in json.loads((workdir / "evaluations.json").read_text())]
            if reached is None and options["every"] and max(scores) >= options["target"]:
                reached = time.perf_counter() - side.begun
    side.check(side.process.returncode == 0)
    steps = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    found = _summary([x["time/step_s"] for x in steps if "rollout/reward" in x], side, reached)
    return found | ({"score at the end": scores[-1]} if options["every"] else {})


def _peer_training(command: list, scratch: pathlib.Path) -> dict[str, float]:
    side = Side(command, scratch)
    side.process.wait()
    side.check(side.process.returncode == 0)
    lines = [json.loads(text) for text in re.findall(r'\{"[^{}]*\}', side.log.read_text())]  # between progress bars
    ends = [line["seconds"] for line in lines if "reward" in line]
    steps = [line["step_s"] for line in lines if "step_s" in line] or [
        b - a for a, b in zip([0, *ends], ends, strict=False)
    ]
    reached = next((line["seconds"] for line in lines if line.get("score", 0) >= GRPO["target"]), None)
    reached = next((line["stopped_s"] for line in lines if "stopped_s" in line), reached)
    return _summary(steps, side, reached)


def _summary(steps: list[float], side: Side, reached: float | None) -> dict[str, float]:
    found = {"step, s": statistics.median(steps[UNCOUNTED:] or steps), "peak memory, GB": side.peak_bytes / 1e9}
    return found | ({} if reached is None else {f"seconds to a score of {GRPO['target']}": reached})


def sft(args, model: pathlib.Path, scratch: pathlib.Path) -> dict:
    """Returns the seconds of a step of supervised fine-tuning, and the peak memory."""
    data, rng, found = (
        scratch / "chats.jsonl",
        random.Random(0),
        collections.defaultdict(lambda: collections.defaultdict(list)),
    )
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(4, 60))) for _ in range(args.steps * SFT["batch"])]
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in texts]
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    fields = {"init_from": model, "warmup.data": data, "warmup.num_steps": args.steps, "inference.max_model_len": 256}
    fields |= {
        "warmup.learning_rate": SFT["learning_rate"],
        "warmup.tasks_per_step": SFT["batch"],
        "train.row_length": 256,
    }
    for turn in range(args.repeats):
        _note(f"turn {turn + 1} of {args.repeats}")
        side = Side(_command("rl.sft", workdir := scratch / f"sft{turn}", fields), scratch)
        side.process.wait()
        side.check(side.process.returncode == 0)
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        results = {"ours": _summary([x["time/step_s"] for x in lines if x["phase"] == "warm-up"], side, None)}
        if args.peer_python:
            command = [
                args.peer_python,
                PEER,
                "sft",
                model,
                data,
                json.dumps(SFT | {"steps": args.steps, "dtype": args.trl_dtype}),
            ]
            results["TRL"] = _peer_training(command, scratch)
        for name, values in results.items():
            for key, value in values.items():
                found[key][name].append(value)
    return {key: _medians(by_side) for key, by_side in found.items()}


def _command(module: str, workdir: pathlib.Path, fields: dict) -> list:
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    return [sys.executable, "-m", module, "--config=configs/finetune.py", f"--workdir={workdir}", *flags]


# ---- the command -----------------------------------------------------------------------------------------------------

PARTS = {"decode": decode, "grpo": grpo, "sft": sft, "score": score}


def main() -> int:
    """Runs the parts; returns the exit code."""
    parser = cli.Parser(prog="python -m bench.real", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["decode", "grpo", "sft"])
    parser.add_argument("--model", type=pathlib.Path, help="folder (default: SmolLM2-135M-Instruct in bfloat16)")
    parser.add_argument("--gguf", type=pathlib.Path, help="the same model for llama.cpp (default: SmolLM2's Q4_1)")
    parser.add_argument("--peer_python", help="interpreter with torch, transformers, peft, datasets, and TRL")
    parser.add_argument("--trl_dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--llama", help="llama-server, of llama.cpp")
    parser.add_argument("--sides", nargs="+", help="of decode: only these, such as 'ours' 'transformers float32'")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 16, 1])
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6, help="of grpo and sft")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--first_seed", type=int, default=0, help="of grpo and score; each repeat has the next one")
    parser.add_argument(
        "--patience", type=float, default=math.inf, help="of score: most seconds of TRL per second of ours"
    )
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results" / "real.json")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sides end, too
    from tests.support import real_model  # imports jax, which --help does not need

    model, args.gguf = args.model or real_model.folder(), args.gguf or (real_model.gguf() if args.llama else None)
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in args.parts:
        with tempfile.TemporaryDirectory() as scratch:
            found = PARTS[part](args, model, pathlib.Path(scratch))
        kept[part] = found
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(kept, indent=1) + "\n")
        for name, values in found.items():
            print(
                f"{part}: {name}: {', '.join(f'{side} {value:.4g}' for side, value in values.items())}{_ratios(values)}"
            )
    return 0


def _medians(by_side: dict[str, list[float]]) -> dict[str, float]:
    return {side: round(statistics.median(values), 3) for side, values in by_side.items()}


def _ratios(values: dict[str, float]) -> str:
    """Returns the ratios of ours to each peer, as text; "" without peers."""
    peers = {side: value for side, value in values.items() if not side.startswith("ours")}
    if not peers or "ours" not in values:
        return ""
    return "; ours: " + ", ".join(f"{values['ours'] / value:.2f} of {side}'s" for side, value in peers.items())


def _port() -> int:
    with contextlib.closing(sockets.listen("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
