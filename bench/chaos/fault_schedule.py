"""The faults of a swarm under test: a pure function of a seed and the nodes.

A deck has a card for each kind of fault and each role that can suffer it. It is shuffled and dealt to random nodes of the role, one
card per `INTERVAL_S`, then shuffled again: so each kind comes up, however short the test. A node with a fault gets no second one.
The impostor comes first, and stays: strangers get a group now and then, and it needs several to be barred.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping

INTERVAL_S = 10.0
REST_S = 15.0  # after a fault, for a node to come back
FOREVER_S = 1e6
# {kind: (roles, shortest and longest duration in seconds)}; 0: instantly over
EVERYBODY = ("learner", "orchestrator", "relay", "server", "worker", "validator")
KINDS: dict[str, tuple[tuple[str, ...], float, float]] = {
    "kill": (EVERYBODY, 0.0, 0.0),
    "stop": (EVERYBODY, 5.0, 30.0),
    "partition": (EVERYBODY, 5.0, 20.0),  # nothing arrives, without an error
    "reset": (EVERYBODY, 0.0, 0.0),  # of all connections
    "delay": (("relay", "server", "worker"), 10.0, 20.0),
    "slow": (("learner", "orchestrator", "relay", "server"), 10.0, 30.0),  # 1 % of the bandwidth
    "full_disk": (("learner", "orchestrator", "relay"), 5.0, 15.0),
    "refuse": (("server",), 15.0, 30.0),  # it answers 400
    "lie": (("server",), 40.0, 60.0),  # another in its place returns other log-probabilities than it has
    "forge": (("impostor",), FOREVER_S, FOREVER_S),  # a worker that submits made-up tokens
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of one node, from `at_s` seconds after the start for `duration_s` seconds."""

    at_s: float
    kind: str
    target: str
    duration_s: float


def schedule(seed: int, roles: Mapping[str, str]) -> Iterator[Fault]:
    """Yields the faults of a test without end. `roles` has the role of each node by name."""
    draw = random.Random(seed)
    cards = [(kind, role) for kind, (hit, *_) in KINDS.items() for role in hit if role in roles.values()]
    busy_until_s: dict[str, float] = {}
    deck = [card for card in cards if card[0] == "forge"]
    cards = [card for card in cards if card not in deck]
    for number in itertools.count(1):
        at_s = number * INTERVAL_S
        free = sorted(name for name in roles if busy_until_s.get(name, 0.0) <= at_s)
        if not any(role == roles[name] for _, role in deck for name in free):
            deck += draw.sample(cards, len(cards))
        for card in [one for one in deck if any(one[1] == roles[name] for name in free)][:1]:
            deck.remove(card)
            kind, role = card
            target = draw.choice([name for name in free if roles[name] == role])
            duration_s = round(draw.uniform(*KINDS[kind][1:]), 1)
            busy_until_s[target] = at_s + duration_s + REST_S
            yield Fault(at_s, kind, target, duration_s)
