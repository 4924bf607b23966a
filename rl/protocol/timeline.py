"""The names of policies: (epoch, version, digest). Imports no jax.

1. Version n is the policy after batch n. A resume that does not repeat bit for bit publishes some numbers again, with other weights.
2. Such a resume therefore begins an epoch, and (epoch, version) names one policy forever. The publisher's signed head
   (sharding/weights/format/head.py) orders policies by it.
3. `digest` proves which weights are meant: the SHA-256 of the manifest that was published under (epoch, version).
"""

import dataclasses
from typing import Any

from sharding.system import text as text_lib

MAX_NUMBER = 2**48  # of an epoch or a version, as in sharding/weights/format/head.py


@dataclasses.dataclass(frozen=True, order=True)
class Policy:
    """One policy of a run, compared and ordered by (epoch, version): no two policies share both."""

    epoch: int
    version: int
    digest: str = dataclasses.field(default="", compare=False)  # SHA-256 of the manifest in hex; "" if unknown

    def to_json(self) -> dict[str, Any]:
        """Returns the policy as a JSON object, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, body: Any) -> "Policy":
        """Returns the policy in a JSON object of any origin. Raises ValueError for any other value."""
        check_fields(body, cls, "policy")
        for name in ("epoch", "version"):
            if type(body[name]) is not int or not 0 <= body[name] <= MAX_NUMBER:
                raise ValueError(f"policy has {name} = {body[name]!r:.80}; send an integer in 0..2^48")
        if body["digest"] != "" and not text_lib.is_hex(body["digest"]):
            raise ValueError(f"policy has digest = {body['digest']!r:.80}; send 64 lowercase hex digits, or ''")
        return cls(**body)

    def __str__(self) -> str:
        return f"version {self.version}" + (f" of epoch {self.epoch}" if self.epoch else "")


def check_fields(body: Any, kind: type, name: str) -> None:
    """Raises ValueError, which calls `body` `name`, unless it is a JSON object with exactly the fields of the dataclass `kind`."""
    fields = sorted(field.name for field in dataclasses.fields(kind))
    if not isinstance(body, dict) or sorted(map(str, body)) != fields:
        raise ValueError(f"{name} is {str(body)[:80]!r}; send an object with exactly the fields {', '.join(fields)}")
