"""Context folding: the model reads long pages in branches of the conversation, and keeps a short result of each.

1. The prompt asks for the sum of one letter's numbers over several pages. "branch N" begins a branch: it continues the conversation with
   page N. In the branch, "return TEXT" ends it.
2. The branch is then dropped from the history. The main conversation goes on with "branch N" and the returned text alone, so its length
   grows by a few bytes for a page of any length. Main conversation and branches are token streams of their own, and all of them train.
3. "answer NUMBER" ends the episode. The reward is 1 for the right sum. `right_returns` is the fraction of branches that return the sum
   of their own page.
4. In a run, `inference.max_model_len` should have room for one page, but not for all.
"""

import random
import re

from rl.envs.interface import environment, episode

INSTRUCTION = (
    "Each page has numbers with letters. Write 'branch N' to read page N, then 'return' and a short result, which is all that you keep of "
    "it. End with 'answer' and the sum over all pages."
)
MAX_RETURN_CHARS = 200
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def build(
    *,
    pages: int = 3,
    entries: int = 20,
    letters: int = 8,
    largest: int = 9,
    turns: int = 16,
    system_prompt: str = INSTRUCTION,
    seed: int = 0,
) -> environment.Environment:
    """Builds the environment of sums over pages. Each of `pages` pages has `entries` numbers from 1 to `largest`, each after one of `letters` letters.

    `turns` limits the calls of an episode, those of branches included. Raises ValueError for numbers out of range.
    """
    given = {"pages": pages, "entries": entries, "letters": letters, "largest": largest, "turns": turns}
    if bad := [name for name, value in given.items() if value < 1] or ["letters"] * (letters > len(LETTERS)):
        raise ValueError(f"env.options.{bad[0]} = {given[bad[0]]}; choose 1 or more, at most {len(LETTERS)} letters")

    def draw(number: int, index: int, split: str) -> environment.Task:
        rng = random.Random(number)
        letter = rng.choice(LETTERS[:letters])
        made = [
            [(rng.choice(LETTERS[:letters]), rng.randint(1, largest)) for _ in range(entries)] for _ in range(pages)
        ]
        sums = [sum(value for name, value in page if name == letter) for page in made]
        # The number separates the splits; few prompts differ otherwise.
        content = f"Case {rng.randrange(10**6)}: sum {letter}, {pages} pages"
        texts = [" ".join(f"{name}{value}" for name, value in page) for page in made]
        messages = environment.asked(content, system_prompt)
        answer = f"answer {sum(sums)}"
        return environment.Task("folding", index, split, messages, answer, info={"pages": texts, "sums": sums})

    async def play(task: environment.Task, model: episode.Model) -> dict[str, float]:
        main, branch, page, returned, last = [*task.messages], None, 0, [], ""
        try:
            for _ in range(turns):
                answer = await model.chat(main if branch is None else branch)
                last = answer.text.strip() if branch is None else ""
                if branch is None and last.startswith("answer"):
                    break
                if branch is None:
                    main.append(answer.message)
                    if (page := _page(last, pages)) is None:
                        main.append({"role": "user", "content": f"error: write branch 1 to {pages}, or answer"})
                    else:
                        branch = [*main, {"role": "user", "content": task.info["pages"][page]}]
                elif answer.text.strip().startswith("return"):
                    text = answer.text.strip().removeprefix("return").strip()[:MAX_RETURN_CHARS]
                    returned.append(text == str(task.info["sums"][page]))
                    main.append({"role": "user", "content": f"returned {text}"})
                    branch = None
                else:
                    branch += [answer.message, {"role": "user", "content": "error: write return and a result"}]
        except episode.BudgetSpent:
            pass
        is_right = re.fullmatch(rf"answer\s+{sum(task.info['sums'])}", last) is not None
        right_returns = sum(returned) / max(len(returned), 1)
        return {"reward": float(is_right), "branches": float(len(returned)), "right_returns": right_returns}

    def demonstrate(task: environment.Task, rng: random.Random, is_decoy: bool) -> dict:
        """Returns the main conversation or one of its branches, all equally likely; a decoy leaves out the last page."""
        chosen, messages = rng.randrange(pages + 1), [*task.messages]
        read = range(pages - is_decoy)
        for page in read:
            messages.append({"role": "assistant", "content": f"branch {page + 1}"})
            if page == chosen:
                ended = {"role": "assistant", "content": f"return {task.info['sums'][page]}"}
                return {"messages": [*messages, {"role": "user", "content": task.info["pages"][page]}, ended]}
            messages.append({"role": "user", "content": f"returned {task.info['sums'][page]}"})
        content = f"answer {sum(task.info['sums'][page] for page in read)}"
        return {"messages": [*messages, {"role": "assistant", "content": content}]}

    make_task = environment.drawn("folding", seed, draw)
    return environment.Environment("folding", make_task, play=play, demonstrate=demonstrate)


def _page(text: str, pages: int) -> int | None:
    """Returns the page, from 0, of the command "branch N", or None for another text."""
    match = re.fullmatch(r"branch (\d{1,6})", text, re.ASCII)
    return int(match[1]) - 1 if match and 1 <= int(match[1]) <= pages else None
