"""A second reader of a run's ledger, without code of the first: sqlite3, hashlib, and ed25519 from `cryptography`."""

import collections
import hashlib
import hmac
import json
import sqlite3
import struct

from cryptography.hazmat.primitives.asymmetric import ed25519

TRUST_SCALE = 32  # a worker's check rate is 32 / (32 + its record)


def check_signature(key: str, signature: bytes, text: bytes):
    ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, text)


def canonical(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def read(path) -> tuple[list[dict], list[str]]:
    """Returns a ledger's events (kind, node, and fields) and their hashes; asserts the chain, signatures, seals, and head."""
    db = sqlite3.connect(path)
    rows = db.execute(
        "SELECT seq, time_ms, event, signature, previous, hash, seal FROM entries ORDER BY seq"
    ).fetchall()
    ((last_number, last_hash, signature),) = db.execute("SELECT seq, hash, signature FROM head").fetchall()
    db.close()
    events, last, now_ms, keeper = [], bytes(32), 0, json.loads(rows[0][2])["author"]
    check_signature(keeper, signature, b"intellax/head/1" + struct.pack("<Q", last_number) + last_hash)
    for number, (seq, time_ms, body, signature, previous, hash_, seal) in enumerate(rows):
        event = json.loads(body)
        assert (seq, previous, event["author"], canonical(event)) == (number, last, keeper, body) and time_ms >= now_ms
        head = b"intellax/entry/1" + struct.pack("<QQ32sQ", seq, time_ms, previous, len(body))
        assert hashlib.sha256(head + body + signature).digest() == hash_
        check_signature(keeper, signature, b"intellax/event/1" + body)
        check_signature(keeper, seal, b"intellax/seal/1" + hash_)
        events.append(event["fields"] | {"kind": event["kind"], "node": event["node"]})
        last, now_ms = hash_, time_ms
    assert (last_number, last_hash) == (len(rows) - 1, last)
    return events, [row[5].hex() for row in rows]


def parse(text: str) -> list[int]:
    """Returns the groups of a batch's text such as "3:12-14,16"."""
    spans = [span.split("-") for span in text.partition(":")[2].split(",") if span]
    return [group for span in spans for group in range(int(span[0]), int(span[-1]) + 1)]


class Timeline:
    """A run by its ledger: the batches that no resume took back, and where each group was last leased, handed in, and refused.

    Asserts that each batch follows the last, and that each of its groups was handed in by its leaseholder, was in no batch, and
    was accepted by the quorum or exempted by the draw. A worker's record is at most its accepted groups so far, with
    `first_record` more if it was invited.
    """

    def __init__(self, path, *, secret: bytes, min_rate: float, first_record: float):
        self.events, self.hashes = read(path)
        self.num_resumes = self.num_void = 0  # the latter: batches that a resume took back
        self.batches: dict[int, dict[int, str]] = {}  # by step: the digest of each group
        self.numbers: dict[int, int] = {}  # by step: of the batch's event
        self.published: dict[int, str] = {}  # by version: the manifest's SHA-256
        self.submissions: dict[str, tuple[str, int]] = {}  # by digest: the group's name, and the event's number
        self.leased, self.refused = {}, {}  # by name, by digest: the number of the last such event
        self.bases = collections.Counter()  # groups in batches, "verified" or "trusted"
        self._rates = min_rate, first_record
        # By (step, group); `_holder` is the one that submitted.
        self._holders, self._holder, self._handed_in, self._votes = {}, {}, {}, {}
        self._invited, self._ejected, self._caught, self._accepted = set(), {}, {}, collections.Counter()
        run = ""
        groups = ((n, event | more) for n, event in enumerate(self.events) for more in ({}, *event.get("also", ())))
        for number, event in groups:
            kind, worker, place = event["kind"], event["node"], (event.get("step"), event.get("group"))
            name, is_training = f"{event.get('split')}/{place[0]}/{place[1]}", event.get("split") == "train"
            is_newest = is_training and self._handed_in.get(place, ("",))[0] == event.get("digest")
            if kind == "resume":
                run = event["run"]
                self._resume(event["step"])
            elif kind == "appoint":
                self._judges, self._quorum = set(event["validators"]), event["quorum"]
                self._draws = hmac.digest(secret, f"{number - 1}:{self.hashes[number - 1]}".encode(), "sha256")
            elif kind == "invite":
                self._invited.add(worker)
            elif kind == "eject":
                self._ejected.setdefault(worker, number)
            elif kind == "publish":
                self.published[event["version"]] = event["digest"]
            elif kind == "lease":
                assert worker not in self._ejected
                self.leased[name] = number
                if is_training:
                    self._holders.setdefault(place, set()).add(worker)
                    self._handed_in.pop(place, None)
            elif kind == "submission":
                self.submissions[event["digest"]] = name, number
                if is_training:
                    assert worker in self._holders[place]
                    self._holder[place] = worker
                    self._handed_in[place], self._votes[place] = (event["digest"], number), {}
            elif kind == "verdict":
                signed = {part: value for part, value in event.items() if part not in ("kind", "node", "signature")}
                text = b"intellax/message/1" + canonical(signed)
                check_signature(event["validator"], bytes.fromhex(event["signature"]), text)
                assert event["run"] == run
                if is_newest and event["validator"] in self._judges:
                    self._votes[place][event["validator"]] = event["accepted"]
                    self._accepted[self._holder[place]] += event["accepted"]
            elif kind == "refusal":
                self.refused[event["digest"]] = number
                if is_newest:
                    del self._handed_in[place]
                    if False in self._votes[place].values():
                        self._caught[worker] = number
            elif kind == "batch":
                self._take(number, event)

    def _resume(self, step: int):
        assert not self.num_resumes or step <= len(self.batches)
        self.num_resumes += 1
        self.num_void += len(self.batches) - step
        self.batches = {past: groups for past, groups in self.batches.items() if past <= step}
        for of_groups in (self._holders, self._holder, self._handed_in, self._votes):
            of_groups.clear()

    def _take(self, number: int, event: dict):
        step, groups = event["step"], {}
        verified, trusted = parse(event["verified"]), parse(event["trusted"])
        for group in sorted(verified + trusted):
            place, owner = (step, group), self._holder[step, group]
            groups[group], submitted = self._handed_in.pop(place)
            if group in verified:
                assert sum(self._votes[place].values()) >= self._quorum, (number, group)
            else:
                is_invited, (min_rate, first_record) = owner in self._invited, self._rates
                record = self._accepted[owner] + first_record * is_invited
                draw = hmac.digest(self._draws, f"train/{step}/{group}".encode(), "sha256")[:8]
                rate = max(min_rate, TRUST_SCALE / (TRUST_SCALE + record))
                assert record and int.from_bytes(draw, "big") / 2**64 >= rate, (number, group)
                assert self._caught.get(owner, -1) < submitted < self._ejected.get(owner, number), (number, group)
        joined = b"".join(map(bytes.fromhex, groups.values()))
        assert event["digest"] == hashlib.sha256(b"intellax/batch/1" + joined).hexdigest()
        assert step == len(self.batches) + 1 and groups
        self.batches[step], self.numbers[step] = groups, number
        self.bases.update(verified=len(verified), trusted=len(trusted))
