"""The environments of a run, their rules, and the order in which groups are given to them. Imports no jax.

1. A run has the environment `config.env`, or several ones: `config.envs` maps a name of your choice to the fields of an `Entry`. Fields
   that are absent have the value of the run (`FIELDS`).
2. Ratios become whole numbers without a common factor. The order of environments repeats after their sum.
3. In the order, the next group of each environment has a deadline, and the earliest one comes next. So the number of groups of each
   environment, among the first n of a run, is its part of n, rounded up or down, for every n.
4. The order depends on the ratios alone, and tasks on the seed and the position among the groups of their environment: anyone can
   recompute them, and a worker can choose neither.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from sharding.system import text as text_lib

MAX_PERIOD = 10_000  # groups after which the order repeats: it is computed at once
MAX_DENOMINATOR = 10_000  # of a ratio, which may be written as 1 / 3
BRANCHES = 4  # of an episode, for which a batch has room
MAX_ENTRIES = 64  # each has metrics of its own
# {field of an entry: the field of the run whose value it has if it is absent}
FIELDS = {
    "samples_per_prompt": "rl.samples_per_prompt",
    "temperature": "sampling.temperature",
    "max_tokens": "sampling.max_tokens",
    "advantage": "rl.advantage",
    "normalize": "rl.normalize",
    "credit": "rl.credit",
    "branch_weight": "rl.branch_weight",
    "overlong_buffer": "rl.overlong_buffer",
    "max_calls": "env.max_calls",
    "max_episode_tokens": "env.max_episode_tokens",
    "thinking": "env.thinking",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One environment of a run, with the rules for its groups."""

    key: str  # the name in `config.envs`; "": the only environment of a run, `config.env`
    name: str  # the same as `env.name`
    options: dict
    num_tasks: int
    digest: str
    samples_per_prompt: int
    temperature: float
    max_tokens: int
    advantage: str
    normalize: str
    credit: str
    branch_weight: float
    overlong_buffer: int
    max_calls: int  # of an episode
    max_episode_tokens: int
    thinking: str
    ratio: float = 1.0  # of its groups to those of the others
    weight: float = 1.0  # of its tokens in the loss

    @property
    def label(self) -> str:
        """The name of the environment in rollouts (`task.env`), metrics, and messages."""
        return self.key or self.name

    def field(self, name: str) -> str:
        """Returns the dotted name of a config field that sets `name` for this environment."""
        if self.key:
            return f"envs.{self.key}.{name}"
        return FIELDS.get(name, f"env.{name}")

    @contextlib.contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Raises a ValueError of its block again, with this environment's fields (envs.NAME.*) in place of `env.*`; unchanged in a run without `envs`."""
        try:
            yield
        except ValueError as error:
            if not self.key:
                raise
            text = re.sub(r"\benv\.(options|name)\b", rf"envs.{self.key}.\1", str(error))
            raise ValueError(f"envs.{self.key}: {text}") from error


EPISODE = ("max_calls", "max_episode_tokens", "thinking")
SENT = ("name", "options", "digest", "max_tokens", *EPISODE)  # to workers, if a run has several environments
# {field of an entry without a default in the run: its default}
OWN = {"name": "", "options": {}, "num_tasks": 0, "digest": "", "ratio": 1.0, "weight": 1.0}
ALL = (*OWN, *FIELDS)


def entries(config) -> dict[str, Entry]:
    """Returns the environments of a run by their names, {"": the only one} for a run without `envs`, in the order of the names.

    Raises ValueError for an entry without a name, with an unknown field, or with a value of another type or out of its range.
    """
    defaults = {field: functools.reduce(operator.getitem, path.split("."), config) for field, path in FIELDS.items()}
    if not config.envs:
        own = {name: config.env[name] for name in ("name", "num_tasks", "digest")}
        return {"": Entry("", **own, options=_plain(config.env.options), **defaults)}
    if len(config.envs) > MAX_ENTRIES:
        raise ValueError(f"envs has {len(config.envs)} environments, more than {MAX_ENTRIES}; leave some out")
    return {key: _entry(key, config.envs[key], defaults) for key in sorted(config.envs)}


def described(config) -> dict[str, Any]:
    """Returns the environments of a run and the rules for their completions, as a worker reads them (`worker.read_runs`)."""
    found = entries(config)
    own = {key: {name: getattr(entry, name) for name in SENT} for key, entry in found.items() if key}
    names = ", ".join(entry.label for entry in found.values())
    env = {"name": names, "digest": config.env.digest, "seed": config.seed} | {n: config.env[n] for n in EPISODE}
    sampling = {name: config.sampling[name] for name in ("top_k", "top_p", "min_p")}
    return {
        "env": env | {"options": {} if own else config.env.options.to_dict()},
        **({"envs": own} if own else {}),
        "max_model_len": config.inference.max_model_len,
        "tokenizer_date": config.tokenizer_date,
        "chat_template_kwargs": config.chat_template_kwargs.to_dict(),
        "sampling": sampling | {"max_tokens": max_tokens(config)},
        "router_replay": config.train.router_replay,
    }


def alone(config, key: str):
    """Returns a copy of the config for a run with only the environment `key` of `entries`; the config itself for ""."""
    if not key:
        return config
    entry = entries(config)[key]
    own = config.as_configdict() if hasattr(config, "as_configdict") else config.copy_and_resolve_references()
    own.unlock()
    own.envs = {}
    own.env.update({name: getattr(entry, name) for name in ("name", "num_tasks", "digest")})
    own.env.options = entry.options
    own.update_from_flattened_dict({path: getattr(entry, field) for field, path in FIELDS.items()})
    return own


def order(config) -> tuple[str, ...]:
    """Returns the environments of the first groups of a run, up to the group from which they repeat."""
    found = entries(config)
    return _order(tuple((key, entry.ratio) for key, entry in found.items()))


def places(config, groups: Iterable[int]) -> list[tuple[str, int]]:
    """Returns (environment, number of earlier groups of this environment) of each group number."""
    pattern = order(config)
    before = _before(pattern)
    totals = {key: pattern.count(key) for key in set(pattern)}
    found = []
    for group in groups:
        turns, place = divmod(group, len(pattern))
        found.append((pattern[place], turns * totals[pattern[place]] + before[place]))
    return found


def digest(config) -> str:
    """Returns the SHA-256 (hex) over names and digests of all environments of a run; "" if one of them has no digest."""
    digests = {key: entry.digest for key, entry in entries(config).items()}
    lines = "".join(f"{key} {one}\n" for key, one in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest() if all(digests.values()) else ""


def max_rollouts(config) -> int:
    """Returns the largest number of samples in a batch of a run: those of its `rl.prompts_per_step` groups, whichever they are."""
    return config.rl.prompts_per_step * max_samples(config)


def max_flat(rl) -> int:
    """Returns the most groups without a signal that are replaced for a batch; `rl` is that section of a config."""
    return math.floor(Fraction(str(rl.refill)) * rl.prompts_per_step)  # 0.29 * 100 is 28.999... in floats


def max_streams(config) -> int:
    """Returns the number of token streams that a batch has room for: an episode of several calls may have BRANCHES on average."""
    rooms = (entry.samples_per_prompt * min(max(entry.max_calls, 1), BRANCHES) for entry in entries(config).values())
    return config.rl.prompts_per_step * max(rooms)


def max_samples(config) -> int:
    """Returns the number of samples in the largest training group."""
    return max(entry.samples_per_prompt for entry in entries(config).values())


def mean_samples(config) -> float:
    """Returns the mean number of samples in a training group."""
    found, pattern = entries(config), order(config)
    return sum(found[key].samples_per_prompt for key in pattern) / len(pattern)


def max_tokens(config) -> int:
    """Returns the largest number of tokens in a completion."""
    return max(entry.max_tokens for entry in entries(config).values())


def max_calls(config) -> int:
    """Returns the largest number of calls in an episode."""
    return max(entry.max_calls for entry in entries(config).values())


def max_branches(config) -> int:
    """Returns the largest number of branches in an episode: one for each call, or the continuations of VinePPO and the sample itself."""
    states = config.vine.num_continuations * config.vine.max_states if config.rl.credit == "vine" else 0
    return max(max_calls(config), 1 + states)


def run_field(name: str) -> str:
    """Returns the run-wide field that `name` overrides: sampling.temperature for envs.sums.temperature. Other names are returned unchanged."""
    section, key, field = [*name.split(".", 2), "", ""][:3]
    return FIELDS.get(field, f"env.{field}") if section == "envs" and key and field else name


@functools.lru_cache(64)
def _order(ratios: tuple[tuple[str, float], ...]) -> tuple[str, ...]:
    exact = {key: Fraction(str(ratio)).limit_denominator(MAX_DENOMINATOR) for key, ratio in ratios}
    scale = math.lcm(*(ratio.denominator for ratio in exact.values()))
    whole = {key: int(ratio * scale) for key, ratio in exact.items()}
    divisor = math.gcd(*whole.values())
    parts = {key: number // divisor for key, number in whole.items()} if divisor else {}
    if not parts or not min(parts.values()) or sum(parts.values()) > MAX_PERIOD:
        shown = ", ".join(f"{key} {ratio:g}" for key, ratio in ratios)
        found = f"the ratios of envs ({shown}) are not whole numbers with a sum of at most {MAX_PERIOD}"
        raise ValueError(f"{found}, nor a multiple of such numbers; round them, as in 7 and 3")
    period, done, out = sum(parts.values()), dict.fromkeys(parts, 0), []
    for place in range(period):
        # The next group of an environment may not come before its part of the groups so far reaches the next whole number.
        begun = [key for key, part in parts.items() if done[key] * period < part * (place + 1)]
        chosen = min(begun, key=lambda key: (-(-(done[key] + 1) * period // parts[key]), key))
        done[chosen] += 1
        out.append(chosen)
    return tuple(out)


@functools.lru_cache(64)
def _before(pattern: tuple[str, ...]) -> tuple[int, ...]:
    """Returns, for each place of the order, the number of earlier places of the same environment."""
    done: dict[str, int] = dict.fromkeys(pattern, 0)
    found = []
    for key in pattern:
        found.append(done[key])
        done[key] += 1
    return tuple(found)


def _entry(key: str, fields: Any, defaults: Mapping[str, Any]) -> Entry:
    if not re.fullmatch("[a-z0-9_]+", key):
        raise ValueError(f"envs has {key!r}; name environments by lower-case letters, digits, and _")
    if not hasattr(fields, "items"):
        raise ValueError(f"envs.{key} = {fields!r} is not an environment; write dict(name=..., ratio=...)")
    given = {name: fields[name] for name in fields}
    for name in given:
        if name not in ALL:
            near = text_lib.hint(f"envs.{key}.{name}", [f"envs.{key}.{known}" for known in ALL])
            raise ValueError(f"envs.{key} has no field {name!r}{near}; set one of {', '.join(ALL)}")
    if not given.get("name"):
        raise ValueError(f"envs.{key} names no environment; set envs.{key}.name, as in 'reverse_text' or 'gsm8k'")
    known = OWN | dict(defaults)
    values = known | given
    options = values.pop("options")
    if not hasattr(options, "items"):
        raise ValueError(f"envs.{key}.options = {options!r} are not options; write dict(option=value)")
    for name, value in values.items():
        kind = type(known[name])
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = isinstance(value, kind) if kind is str else is_number and (kind is float or isinstance(value, int))
        if not is_right:
            word = {int: "a whole number", float: "a number", str: "a text"}[kind]
            raise ValueError(f"envs.{key}.{name} = {value!r} is not {word}; correct it")
    for name in ("ratio", "weight"):
        if not 0 < values[name] < math.inf:
            raise ValueError(
                f"envs.{key}.{name} = {values[name]} must be above 0, and finite; correct it, or remove envs.{key}"
            )
    return Entry(key, options=_plain(options), **values)


def _plain(options: Any) -> dict:
    return options.to_dict() if hasattr(options, "to_dict") else dict(options)
