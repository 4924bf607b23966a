"""One checkpoint, scored by our server and by transformers' `generate` on the same tasks: the scores agree within their interval."""

import json
import subprocess

import pytest

from rl import envs
from rl.evaluation import comparison, samples
from tests.models.hf import test_variants
from tests.support import tiny_run

NUM_TASKS, NUM_SAMPLES = 60, 8
OPTIONS = {
    "min_length": 3,
    "max_length": 5,
    "alphabet": "abcdefgh",
    "reward": "lcs",
}  # of the quickstart, as tiny_run has it
PROGRAM = """
import json, sys
import torch, transformers
folder, file, temperature = sys.argv[1], sys.argv[2], float(sys.argv[3])
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
torch.manual_seed(0)
rule = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
for messages in json.load(open(file)):
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = model.generate(**prompt, **rule, max_new_tokens=12, num_return_sequences=int(sys.argv[4]) if temperature else 1)
    print(json.dumps(tokenizer.batch_decode(found[:, prompt["input_ids"].shape[1]:], skip_special_tokens=True)))
"""


@pytest.mark.slow
def test_scores_agree_with_those_of_transformers(tmp_path):
    """The greedy completions are equal; sampled ones have a mean within the paired 95 % interval, unless at another temperature."""
    fields = {"warmup.num_steps": 60, "evaluation.num_tasks": NUM_TASKS, "evaluation.samples_per_task": NUM_SAMPLES}
    fields |= {"evaluation.temperature": 1.0}
    workdir, exported = tmp_path / "run", tmp_path / "exported"
    command = lambda module, *flags, **more: [*tiny_run.command(workdir, module=module, **fields | more), *flags]  # noqa: E731
    for argv in (
        command("rl.sft"),
        command("rl.evaluate"),
        command("rl.evaluate", **{"evaluation.temperature": 0.0, "evaluation.samples_per_task": 1}),
        command("rl.export", f"--output={exported}"),
    ):
        done = subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    sampled = samples.read(workdir / "samples" / "held_out_0.jsonl")
    (other,) = (workdir / "samples").glob("other_*.jsonl")
    env = envs.load("reverse_text", seed=0, **OPTIONS)
    tasks = [env.make_task(index, "held_out") for index in range(NUM_TASKS)]
    index_of = lambda row: int(row["task"].rpartition("/")[2])  # noqa: E731
    names = {index_of(row): row["task"] for row in sampled}
    assert sorted(names) == [*range(NUM_TASKS)]
    (tmp_path / "messages.json").write_text(json.dumps([task.messages for task in tasks]))

    def theirs(temperature):
        printed = test_variants.run_torch(
            PROGRAM, str(exported), str(tmp_path / "messages.json"), str(temperature), str(NUM_SAMPLES)
        )
        return [json.loads(line) for line in printed.splitlines()]

    def difference(completions):
        rows = [
            {"task": names[index], "sample": number, "reward": env.score(tasks[index], text)["reward"]}
            for index, texts in enumerate(completions)
            for number, text in enumerate(texts)
        ]
        return comparison.compare(samples.by_task(sampled), samples.by_task(rows))[0]

    greedy = [row["completion"] for row in sorted(samples.read(other), key=index_of)]
    unequal = sum(mine != text for mine, (text,) in zip(greedy, theirs(0.0), strict=True))
    assert unequal <= 1  # two logits may be equal to rounding
    found, hotter = difference(theirs(1.0)), difference(theirs(2.0))
    print(
        f"ours {found.a:.3f}, transformers {found.b:.3f}, interval of the difference {found.low:.3f} to {found.high:.3f}"
    )
    assert found.name == f"avg@{NUM_SAMPLES}" and 0.1 < found.a < 0.9
    assert found.low <= 0 <= found.high and not hotter.low <= 0 <= hotter.high, (found, hotter)
