"""Runs the peers of bench/real.py, in an interpreter that has torch, transformers, peft, datasets, and TRL; imports nothing of ours.

    PYTHON bench/real_peer.py generate MODEL DTYPE           reads lines {"prompts", "new"}, answers {"seconds"}
    PYTHON bench/real_peer.py grpo MODEL DATA HELD_OUT JSON  prints {"step", "seconds", "reward"}, {"score", "seconds"}, and {"stopped_s"}
    PYTHON bench/real_peer.py sft MODEL DATA JSON            prints {"step", "step_s"}

JSON has the settings of the run. Held-out scores are greedy; their time is not counted, nor is the time before the first step.
"""

import json
import re
import sys
import tempfile
import time

import torch
import transformers


def main() -> None:
    """Runs one of the peers."""
    torch.set_num_threads(2)
    {"generate": generate, "grpo": grpo, "sft": sft}[sys.argv[1]](*sys.argv[2:])


def load(folder: str, dtype: str):
    """Returns (tokenizer, model)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def encoded(tokenizer, prompts: list[str]):
    """Returns chat prompts as one padded batch."""
    chats = [[{"role": "user", "content": text}] for text in prompts]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)


def say(**values) -> None:
    """Prints a line of JSON."""
    print(json.dumps(values), flush=True)


def generate(folder: str, dtype: str) -> None:
    """Answers rounds of prompts until the input ends."""
    tokenizer, model = load(folder, dtype)
    say(ready=True)
    for line in sys.stdin:
        work = json.loads(line)
        begun = time.perf_counter()
        with torch.no_grad():
            limits = dict(max_new_tokens=work["new"], min_new_tokens=work["new"])
            model.generate(**encoded(tokenizer, work["prompts"]), **limits, do_sample=True, top_k=0)
        say(seconds=time.perf_counter() - begun)


def number(text: str) -> str | None:
    """Returns the last number of a text."""
    found = re.findall(r"-?\d+", text.replace(",", ""))
    return found[-1] if found else None


def lora(settings: dict):
    """Returns the adapters' settings."""
    import peft

    return peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def grpo(folder: str, data: str, held_out: str, settings: str) -> None:
    """Trains adapters by GRPO, and evaluates every few steps on held-out tasks."""
    import datasets
    import trl

    options = json.loads(settings)
    tokenizer, model = load(folder, options["dtype"])
    rows, tests = ([json.loads(line) for line in open(path)] for path in (data, held_out))
    prompts = [{"prompt": [{"role": "user", "content": x["prompt"]}], "answer": x["answer"]} for x in rows]
    rewards: list[float] = []
    spent = {"paused": 0.0, "begun": time.perf_counter()}

    def reward(completions, answer, **_):
        values = [float(number(c[0]["content"]) == wanted) for c, wanted in zip(completions, answer, strict=True)]
        rewards.append(sum(values) / len(values))
        return values

    def score() -> float:
        with torch.no_grad():
            batch = encoded(tokenizer, [test["prompt"] for test in tests])
            ids = trainer.model.generate(**batch, max_new_tokens=options["tokens"], do_sample=False)
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(number(text) == test["answer"] for text, test in zip(texts, tests, strict=True)) / len(tests)

    class Clock(transformers.TrainerCallback):
        """Prints each step, and held-out scores."""

        def on_step_end(self, args, state, control, **_):
            seconds = time.perf_counter() - spent["begun"] - spent["paused"]
            say(step=state.global_step, seconds=seconds, reward=rewards[-1])
            if seconds > options["most_s"]:
                say(stopped_s=seconds)
                control.should_training_stop = True
                return control
            if options["every"] and state.global_step % options["every"] == 0:
                begun = time.perf_counter()
                found = score()
                spent["paused"] += time.perf_counter() - begun
                say(score=found, seconds=seconds)
                control.should_training_stop = found >= options["target"]
            return control

    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=options["prompts"] * options["samples"],
        num_generations=options["samples"],
        max_completion_length=options["tokens"],
        learning_rate=options["learning_rate"],
        lr_scheduler_type="constant",
        max_steps=options["steps"],
        seed=options["seed"],
        beta=0.0,
        temperature=1.0,
        top_k=0,
        use_cpu=True,
        bf16=options["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=tokenizer,
        peft_config=lora(options),
        callbacks=[Clock()],
    )
    spent["begun"] = time.perf_counter()
    trainer.train()


def sft(folder: str, data: str, settings: str) -> None:
    """Trains adapters on conversations."""
    import datasets
    import trl

    options = json.loads(settings)
    tokenizer, model = load(folder, options["dtype"])
    rows = [json.loads(line) for line in open(data)]
    # TRL's mask of the assistant's tokens needs {% generation %} in the template: prompt and completion have it built in.
    pairs = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in rows]
    last = [time.perf_counter()]

    class Clock(transformers.TrainerCallback):
        """Prints each step."""

        def on_train_begin(self, *_, **__):
            last[0] = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            now = time.perf_counter()
            say(step=state.global_step, step_s=now - last[0])
            last[0] = now

    config = trl.SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=options["steps"],
        per_device_train_batch_size=options["batch"],
        learning_rate=options["learning_rate"],
        lr_scheduler_type="constant",
        max_length=256,
        completion_only_loss=True,
        gradient_checkpointing=False,
        bf16=options["dtype"] == "bfloat16",
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trl.SFTTrainer(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=tokenizer,
        peft_config=lora(options),
        callbacks=[Clock()],
    ).train()


if __name__ == "__main__":
    main()
