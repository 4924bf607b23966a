"""The rate at which a worker's groups are replayed, and the draw that decides it: for an orchestrator, a validator, and an auditor.

A worker of reputation r is checked at the rate max(min_rate, 1 - r). The draw of a group depends on a secret that workers do not
have, and on the group alone: neither the choice of files nor another attempt changes it.
"""

import hmac

HALF_AT = 32  # groups that passed a replay, without a fault, bring a reputation from 0 to 1/2
FAULT = 2 * HALF_AT  # how many of these one fault outweighs


def reputation(num_passed: float, num_faults: int = 0) -> float:
    """Returns the reputation in [0, 1) of a worker after this many replays that it passed and faults."""
    return num_passed / (num_passed + HALF_AT + FAULT * num_faults)


def rate(reputation: float, min_rate: float) -> float:
    """Returns the probability with which a group of a worker of this reputation is replayed."""
    return max(min_rate, 1 - reputation)


def draw(secret: bytes, group: str) -> float:
    """Returns the number in [0, 1) of a group's name: a rate above it means that the group is replayed."""
    digest = hmac.digest(secret, group.encode(), "sha256")
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # all bits of a float: it never rounds to 1
