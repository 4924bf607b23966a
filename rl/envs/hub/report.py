"""Reports of the admission check: JSON, signed by the key of its author, about one environment by its digest.

A report is an object with `format`, `environment` (name, digest, options, seed), `kind` (declared, tested), `verdict`, `checks`, `plan` (sizes of
the trials), `platform`, `time_s`, `signer`, and `signature`. Each check has RFC 008's names: check_id, status, severity, measured, rule, evidence.
"""

import dataclasses
import json
import os
import pathlib
import platform
import textwrap
import time
from typing import Any

from inference.rollouts import rollout as rollout_lib
from rl.envs.hub import rules, trial
from rl.envs.interface import environment
from sharding.system import atomic_file, signed_message
from sharding.system import text as text_lib

FORMAT = "intellax/environment-report/1"
MAX_BYTES = 2**22
_KEYS: dict[str, type] = dict.fromkeys(("environment", "kind", "plan", "platform"), dict)
_KEYS |= {"verdict": str, "signer": str, "checks": list, "time_s": int}


def make(plan: trial.Plan, name: str, digest: str, declared: str, judged: rules.Judgement, *, clock=time.time) -> dict:
    """Returns an unsigned report of a judgement on the environment `name` with this digest."""
    sizes = {field: getattr(plan, field) for field in ("tasks", "scored", "episodes", "limit_s")}
    return {
        "format": FORMAT,
        "environment": {"name": name, "digest": digest, "options": plan.options, "seed": plan.seed},
        "kind": {"declared": declared, "tested": judged.kind},
        "verdict": "pass" if judged.passed else "fail",
        "checks": [dataclasses.asdict(check) | {"evidence": list(check.evidence)} for check in judged.checks],
        "plan": sizes,
        "platform": {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()},
        "time_s": int(clock()),
    }


def sign(report: dict, key: rollout_lib.WorkerKey) -> dict:
    """Returns the report with `signer` and `signature` of a key."""
    return signed_message.sign(key.private, report | {"signer": key.worker})


def write(report: dict, path: str | os.PathLike) -> None:
    """Writes a report to a file, completely or not at all."""
    atomic_file.write(path, json.dumps(report, indent=1).encode())


def read(path: str | os.PathLike, signer: str = "") -> dict:
    """Returns the report in a file. Raises ValueError if it is malformed, changed, or signed by another key than `signer` (hex; "": any)."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file; name the file of a report")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES} bytes, so it is not a report; name another file")
    try:
        return verified(json.loads(path.read_bytes()), signer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def verified(found: Any, signer: str = "") -> dict:
    """Returns `found`, any JSON value, if it is a signed report. Raises ValueError otherwise, as `read` does."""
    is_shaped = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in _KEYS.items())
    if not is_shaped or found.get("format") != FORMAT:
        raise ValueError(f"it is not a report of the format {FORMAT}; make one with `python -m rl.envs check --report`")
    if not signed_message.is_signed(found["signer"], found):
        raise ValueError(f"the signature of {found['signer'][:16]} does not fit its content; get the report again")
    if signer not in ("", found["signer"]):
        raise ValueError(f"it is signed by {found['signer']}, not by {signer}; get a report of the right author")
    return found


def passed(report: dict) -> bool:
    """Returns True if a verified report admits the environment: its verdict is "pass", and no check of severity "fail" failed."""
    failed = [one for one in report["checks"] if one.get("status") == "fail" and one.get("severity") == "fail"]
    return report["verdict"] == "pass" and not failed and report["kind"].get("tested") in environment.KINDS


def table(report: dict) -> str:
    """Returns the report as a table for people."""
    named = report["environment"]
    lines = [f"{named['name']}  digest {named['digest'][:16]}  declared {report['kind']['declared']}", ""]
    for check in report["checks"]:
        status = "warn" if check["severity"] == "warn" and check["status"] == "fail" else check["status"]
        measured = check["measured"]
        if isinstance(measured, dict):
            measured = ", ".join(f"{name} {value:g}" for name, value in measured.items())
        lines.append(f"{status:<5} {check['check_id']:<36} {measured}")
        if check["status"] == "fail":
            lines += [
                f"      rule: {check['rule']}",
                *(textwrap.shorten(f"      - {x}", 240) for x in check["evidence"]),
            ]
    was_tried = report["kind"]["declared"] != "unknown"
    shown = f"its trials show the kind {report['kind']['tested']}" if was_tried else "it could not be tried"
    lines += ["", f"{report['verdict']}: {shown}"]
    return "\n".join(map(text_lib.printable, lines))
