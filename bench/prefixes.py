"""Counts the tokens that the learner computes for 1,000 random episodes in groups of 4, with tools, cut replies, and rewritten histories.

    python -m bench.prefixes

They are packed as trees with shared prompts, next to one sequence for each branch, as other trainers compute them.
"""

import asyncio

from inference.rollouts import rollout as rollout_lib
from rl.envs.recording import rollouts as rollouts_lib
from rl.envs.recording import session as session_lib
from rl.learning.batch import credit
from tests.support import episodes


def main() -> None:
    """Prints the counts for each rule for reasoning."""
    rule = credit.Credit(advantage="group_mean")
    for thinking in session_lib.THINKING:
        packed = alone = sampled = branches = 0
        for number in range(250):
            group = []
            for sample in range(4):
                one = episodes.session(episodes.Backend(), seed=number, number=sample, thinking=thinking)
                asyncio.run(episodes.drawn(number)(one))
                origin = rollouts_lib.Origin(rollout_lib.TaskRef("drawn", number, number, 0), 1, 1.0)
                group += rollouts_lib.of_episode(one, origin, {"reward": float(sample)})
            trained = [rollout for rollout in group if rollout.trains]
            alone += sum(len(rollout.tokens) for rollout in trained)
            sampled += sum(int(rollout.sampled_mask.sum()) for rollout in trained)
            branches += len(trained)
            packed += sum(tree.num_tokens for tree in rule.assign([group])[0])
        print(
            f"thinking {thinking!r}: {branches} branches of 1,000 episodes, {sampled} sampled tokens; {alone} tokens as one sequence per "
            f"branch, {packed} as trees: {packed / alone:.2f}"
        )


if __name__ == "__main__":
    main()
