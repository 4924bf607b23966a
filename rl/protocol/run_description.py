"""The description of a run for its workers: the fields of `GET /run` that are the same as long as the run is on. Imports no jax."""

from collections.abc import Mapping
from typing import Any

from rl.protocol import env_mix

EPISODE = ("max_calls", "max_episode_tokens", "thinking")
SENT = ("name", "options", "digest", "max_tokens", *EPISODE)  # of each environment, if a run has several


def describe(config, entries: Mapping[str, env_mix.Entry], tokenizer: str) -> dict[str, Any]:
    """Returns the description of a run with this resolved config, as `rl.worker` reads it.

    `entries` are its environments (`env_mix.entries`), `tokenizer` is the name by which workers find its tokenizer.
    """
    several = {key: {name: getattr(one, name) for name in SENT} for key, one in entries.items() if key}
    env = {"name": names(entries), "digest": config.env.digest, "seed": config.seed}
    env["options"] = {} if several else entries[""].options
    sampling = {name: config.sampling[name] for name in ("top_k", "top_p", "min_p")}
    described = {
        "env": env | {name: config.env[name] for name in EPISODE},
        "max_model_len": config.inference.max_model_len,
        "tokenizer": tokenizer,
        "tokenizer_date": config.tokenizer_date,
        "chat_template_kwargs": config.chat_template_kwargs.to_dict(),
        "sampling": sampling | {"max_tokens": env_mix.max_tokens(config)},
        "router_replay": config.train.router_replay,
    }
    return described | ({"envs": several} if several else {})


def names(entries: Mapping[str, env_mix.Entry]) -> str:
    """Returns the name of the run's environment, or those of all with commas."""
    return ", ".join(one.label for one in entries.values())
