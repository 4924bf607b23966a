"""A worker without a model: it writes reference answers or junk, claims that each token was certain, and makes proofs up."""

import numpy as np

from inference.rollouts import rollout as rollout_lib
from rl import envs
from tests.support import proofs, tiny


class Forger:
    """Forges the groups of an experiment. With `formed`, proofs have the right form: those of random states."""

    def __init__(self, exp, *, formed: bool):
        config = exp.config
        self._exp, self._formed, self._rng = exp, formed, np.random.default_rng(0)
        self._env = envs.load(config.env.name, seed=config.seed, **config.env.options.to_dict())

    def forge(self, group, key, version, flat=False) -> list[rollout_lib.Rollout]:
        """Returns signed rollouts of a leased group: odd samples are right, so that the advantage is not 0, unless it is to be flat."""
        exp, tokenizer = self._exp, self._exp.tokenizer
        task = self._env.make_task(group.index, group.split)
        prompt = list(tokenizer.render(task.messages, add_generation_prompt=True).token_ids)
        out = []
        for sample in range(group.num_samples):
            text = task.answer if sample % 2 and not flat else "x" * (1 + sample)
            tokens = [*prompt, *tokenizer.encode(text), list(tokenizer.stop_ids)[0]]
            mask = np.arange(len(tokens)) >= len(prompt)
            scores = self._env.score(task, tokenizer.scored_text(prompt, tokens[len(prompt) :]))
            states = self._rng.standard_normal((int(mask.sum()), exp.model.model_dim)).astype(np.float32)
            made_up = b"".join(proofs.build(states))
            rollout = tiny.rollout(
                mask,
                tokens=np.array(tokens, np.int32),
                logprobs=np.where(mask, -0.001, 0).astype(np.float32),
                versions=np.full(len(tokens), version, np.int32),
                temperature=group.temperature,
                seed=(group.seed + sample) % 2**32,
                task=rollout_lib.TaskRef(exp.config.env.name, group.index, group.group, exp.config.seed),
                sample=sample,
                step=group.step,
                reward=scores["reward"],
                rewards=scores,
                finish_reason="stop",
                epoch=max(group.epoch, 0),
                proofs=made_up if self._formed else bytes(len(made_up)),
            )
            out.append(rollout_lib.sign(rollout, key))
        return out
