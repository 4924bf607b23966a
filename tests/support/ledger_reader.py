"""A second reader of a run's ledger, without code of the first: sqlite3, hashlib, and ed25519 from `cryptography`."""

import collections
import dataclasses
import hashlib
import hmac
import json
import sqlite3
import struct

from cryptography.hazmat.primitives.asymmetric import ed25519


def check_signature(key: str, signature: bytes, text: bytes):
    ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, text)


def canonical(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def read(path) -> tuple[list[dict], list[str]]:
    """Returns the events of a ledger (kind, node, and fields) and the hash of each; asserts the chain, signatures, seals, and head."""
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT seq, time_ms, event, signature, previous, hash, seal FROM entries ORDER BY seq")
        rows, heads = rows.fetchall(), db.execute("SELECT seq, hash, signature FROM head").fetchall()
    db.close()
    events, last, now_ms, keeper = [], bytes(32), 0, json.loads(rows[0][2])["author"]
    for number, (seq, time_ms, body, signature, previous, hash_, seal) in enumerate(rows):
        event = json.loads(body)
        assert (seq, previous, event["author"], canonical(event)) == (number, last, keeper, body) and time_ms >= now_ms
        head = b"intellax/entry/1" + struct.pack("<QQ32sQ", seq, time_ms, previous, len(body))
        assert hashlib.sha256(head + body + signature).digest() == hash_
        check_signature(keeper, signature, b"intellax/event/1" + body)
        check_signature(keeper, seal, b"intellax/seal/1" + hash_)
        events.append(event["fields"] | {"kind": event["kind"], "node": event["node"]})
        last, now_ms = hash_, time_ms
    ((seq, hash_, signature),) = heads
    assert (seq, hash_) == (len(rows) - 1, last)
    check_signature(keeper, signature, b"intellax/head/1" + struct.pack("<Q", seq) + hash_)
    return events, [row[5].hex() for row in rows]


@dataclasses.dataclass
class Timeline:
    """The batches of a run that no resume took back: {step: {group: digest}}, and {digest: (group's name, event's number)} of all submissions."""

    batches: dict[int, dict[int, str]]
    numbers: dict[int, int]  # of the event of each batch
    submissions: dict[str, tuple[str, int]]
    num_resumes: int = 0
    num_void: int = 0  # batches that a resume took back
    num_verified: int = 0  # groups of `batches`
    num_trusted: int = 0


def parse(text: str) -> list[int]:
    """Returns the groups of a batch's text such as "3:12-14,16"."""
    spans = [span.split("-") for span in text.partition(":")[2].split(",") if span]
    return [group for span in spans for group in range(int(span[0]), int(span[-1]) + 1)]


def replay(events: list[dict], hashes: list[str], *, secret: bytes, min_rate: float, first_record: float) -> Timeline:
    """Asserts that each batch follows the last, that its groups were verified by the quorum, or drawn as exempt; returns the rest.

    A worker's record is at most its accepted groups so far, with `first_record` more if it was invited.
    """
    line = Timeline({}, {}, {})
    holder, handed_in, votes = {}, {}, {}
    invited, caught, accepted = set(), {}, collections.Counter()
    bases, step = {}, 0
    for number, event in enumerate(events):
        kind, worker = event["kind"], event["node"]
        place = event.get("step"), event.get("group")
        is_training = event.get("split") == "train"
        if kind == "resume":
            assert not line.num_resumes or event["step"] <= step
            line.num_resumes, step, run = line.num_resumes + 1, event["step"], event["run"]
            line.num_void += sum(past > step for past in line.batches)
            line.batches = {past: groups for past, groups in line.batches.items() if past <= step}
            holder.clear(), handed_in.clear(), votes.clear()
        elif kind == "appoint":
            judges, quorum = set(event["validators"]), event["quorum"]
            draws = hmac.digest(secret, f"{number - 1}:{hashes[number - 1]}".encode(), "sha256")
        elif kind == "invite":
            invited.add(worker)
        elif kind == "lease" and is_training:
            holder[place] = worker
            handed_in.pop(place, None)
        elif kind == "submission":
            line.submissions[event["digest"]] = f"{event['split']}/{event['step']}/{event['group']}", number
            if is_training:
                assert holder[place] == worker
                handed_in[place], votes[place] = (event["digest"], number), {}
        elif kind == "verdict":
            signed = {name: value for name, value in event.items() if name not in ("kind", "node", "signature")}
            assert event["run"] == run
            text = b"intellax/message/1" + canonical(signed)
            check_signature(event["validator"], bytes.fromhex(event["signature"]), text)
            if handed_in.get(place, ("",))[0] == event["digest"] and event["validator"] in judges:
                votes[place][event["validator"]] = event["accepted"]
                accepted[holder[place]] += event["accepted"]
        elif kind == "refusal" and is_training and handed_in.get(place, ("",))[0] == event["digest"]:
            if False in votes.pop(place).values():
                caught[worker] = number
            del handed_in[place]
        elif kind == "batch":
            step += 1
            verified, trusted = parse(event["verified"]), parse(event["trusted"])
            groups = {group: handed_in.pop((step, group)) for group in sorted(verified + trusted)}
            assert event["step"] == step and len(groups) == len(verified) + len(trusted) > 0
            for group in verified:
                assert sum(votes[step, group].values()) >= quorum, (number, group)
            for group in trusted:
                owner = holder[step, group]
                assert groups[group][1] > caught.get(owner, -1) and (owner in invited or accepted[owner])
                draw = hmac.digest(draws, f"train/{step}/{group}".encode(), "sha256")[:8]
                record = accepted[owner] + first_record * (owner in invited)
                assert int.from_bytes(draw, "big") / 2**64 >= max(min_rate, 32 / (32 + record)), (number, group)
            joined = b"".join(bytes.fromhex(digest) for digest, _ in groups.values())
            assert event["digest"] == hashlib.sha256(b"intellax/batch/1" + joined).hexdigest()
            line.batches[step] = {group: digest for group, (digest, _) in groups.items()}
            line.numbers[step], bases[step] = number, (len(verified), len(trusted))
    assert list(line.batches) == list(range(1, step + 1))
    line.num_verified, line.num_trusted = (sum(bases[past][i] for past in line.batches) for i in (0, 1))
    return line
