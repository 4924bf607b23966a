"""Supervised fine-tuning next to TRL's SFTTrainer: tokens per second and loss, from the same checkpoint on the same conversations.

    python -m bench.sft --trl /venv/bin/python

1. A folder with a Qwen3-type model of 4.1 M parameters with random weights (bench/grpo_step.py describes it) and the byte-level
   tokenizer. Conversations of 1 to 4 turns and 30 to 294 tokens, most of them short; their answers repeat the question.
2. Ours is the command `rl.sft` with the rows that it chooses (`train.rows = 0`), TRL's is bench/sft_peer.py: batches of 32
   conversations in the same order, loss on the answers, AdamW with the same rates, clip norm 1, float32. TRL pads 8 conversations at
   a time, and accumulates their gradients; it packs only on GPUs with flash attention.
3. The two take turns `--rounds` times, so that a busy machine is busy for both. Steps of a step's duration, data included; the
   first `--warmup` steps are not counted.

Acceptance: at least 1.5 times TRL's tokens per second (median of rounds), and every loss within 2 % of TRL's.
"""

import dataclasses
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

from sharding.system import cli

BATCH, TARGET, LOSS_RATIO = 32, 1.5, 1.02
WORDS = "sun moon river stone cloud apple seven tiger green winter paper lantern".split()


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = cli.Parser(prog="python -m bench.sft", description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4, help="steps that are not counted")
    parser.add_argument("--rounds", type=int, default=3, help="number of turns of each side")
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter with trl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, data = pathlib.Path(scratch) / "model", pathlib.Path(scratch) / "data.jsonl"
        fields = write(folder, data, args.steps)
        sides = {"ours": lambda turn: ours(folder, data, pathlib.Path(scratch) / f"run_{turn}", args.steps, fields)}
        if args.trl:
            command = [args.trl, "bench/sft_peer.py", str(folder), str(data), str(args.steps), str(BATCH)]
            sides["trl"] = lambda turn: [json.loads(line) for line in _output(command).splitlines() if line[:2] == '{"']
        found: dict[str, list[list[dict]]] = {side: [] for side in sides}
        for turn in range(args.rounds):
            for side, run in sides.items():
                print(f"round {turn + 1} of {args.rounds}: {side}", file=sys.stderr, flush=True)
                found[side].append(run(turn))
        return report(found, args.warmup, num_tokens(folder, data))


def write(folder: pathlib.Path, data: pathlib.Path, num_steps: int) -> list[str]:
    """Writes the model's folder and the conversations, in the order of our batches; returns the flags of the model's fields."""
    import jax  # here, so that the process that waits for the others uses no memory

    from configs import base
    from models import hf, transformer
    from models.text import tokenizer
    from rl import sft
    from tests.support import shapes

    model = shapes.model("4m")
    hf.save(folder, model, transformer.init(jax.random.key(0), model), write_more=tokenizer.byte_chatml().save)
    rng, records = random.Random(0), []
    for _ in range(num_steps * BATCH):
        messages = []
        for _ in range(rng.randint(1, 4)):
            text = " ".join(rng.choices(WORDS, k=1 + int(6 * rng.random() ** 3)))
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        records.append({"messages": messages})
    mixed = sft.mix([[{"row": i} for i in range(len(records))]], (), BATCH, base.get_config().seed)
    order = [row["row"] for number in range(num_steps) for row in mixed[number]]
    in_file = [record for _, record in sorted(zip(order, records, strict=True), key=lambda pair: pair[0])]
    data.write_text("".join(json.dumps(record) + "\n" for record in in_file))
    data.with_suffix(".ordered").write_text("".join(json.dumps(record) + "\n" for record in records))
    defaults, fields = base.get_config().model.to_dict(), dataclasses.asdict(model)
    return [f"--config.model.{name}={fields[name]}" for name in fields if fields[name] != defaults[name]]


def ours(folder, data, workdir, num_steps: int, fields: list[str]) -> list[dict]:
    """Runs rl.sft; returns {"loss", "step_s"} of each step."""
    changes = {"init_from": folder, "warmup.data": data, "warmup.num_steps": num_steps, "warmup.learning_rate": 1e-3}
    changes |= {
        "warmup.tasks_per_step": BATCH,
        "inference.max_model_len": 512,
        "train.row_length": 512,
        "train.rows": 0,
    }
    flags = [*fields, *(f"--config.{name}={value}" for name, value in changes.items())]
    _output([sys.executable, "-m", "rl.sft", "--config=configs/base.py", f"--workdir={workdir}", *flags])
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{"loss": line["loss/total"], "step_s": line["time/step_s"]} for line in lines if line["phase"] == "warm-up"]


def num_tokens(folder: pathlib.Path, data: pathlib.Path) -> list[int]:
    """Returns the number of tokens of each step's conversations, without padding."""
    from models.text import tokenizer

    render = tokenizer.load(folder).render
    records = [json.loads(line) for line in data.with_suffix(".ordered").read_text().splitlines()]
    lengths = [len(render(record["messages"]).token_ids) for record in records]
    return [sum(lengths[at : at + BATCH]) for at in range(0, len(lengths), BATCH)]


def report(found: dict[str, list[list[dict]]], warmup: int, tokens: list[int]) -> int:
    """Prints tokens per second and losses; returns 1 if a target was missed."""
    rates = {
        side: [sum(tokens[warmup:]) / sum(step["step_s"] for step in steps[warmup:]) for steps in rounds]
        for side, rounds in found.items()
    }
    for side, values in rates.items():
        losses = [step["loss"] for step in found[side][0]]
        step_s = statistics.median(step["step_s"] for steps in found[side] for step in steps[warmup:])
        print(
            f"{side:5} {statistics.median(values):9.0f} tokens/s  step {step_s:.3f} s  loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        )
    if "trl" not in found:
        return 0
    ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates["trl"], strict=True))
    pairs = zip(found["ours"][0], found["trl"][0], strict=True)
    apart = max(max(a["loss"] / b["loss"], b["loss"] / a["loss"]) for a, b in pairs)
    print(f"tokens/s of ours / TRL's {ratio:.2f}  target {TARGET}; losses at most {100 * (apart - 1):.2f} % apart")
    return int(ratio < TARGET or apart > LOSS_RATIO)


def _output(command: list[str]) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    return result.stdout


if __name__ == "__main__":
    sys.exit(main())
