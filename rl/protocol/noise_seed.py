"""The seeds of sampling noise: pure functions of the run's seed and of prompts, so that no worker can resample until it likes a completion.

No jax here: workers compute them, too.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


def sampling_seed(seed: int, split: str, step: int, group: int) -> int:
    """Returns the seed of the noise of a group's sample 0: a uint32 from SHA-256, so that groups share noise only by chance."""
    text = f"intellax/sampling/{seed}/{split}/{step}/{group}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def stream_seed(seed: int, sample: int, branch: int, prompt: Sequence[int] | np.ndarray, draw: int = 0) -> int:
    """Returns the seed of the noise of a branch of sample `sample` of the group with `seed`; `prompt` is that of its first call.

    `draw` numbers the branches with this prompt that an environment asked for.
    """
    if branch == 0:
        return (seed + sample) % 2**32
    content = hashlib.sha256(np.asarray(prompt, "<i4").tobytes()).hexdigest()
    text = f"intellax/stream/{seed}/{sample}/{content}" + f"/{draw}" * (draw > 0)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
