"""Publishes environment packages to an index, and installs them from one.

1. `publish` takes a package folder (or its wheel) with a report of the admission check that passed on the same code, and adds it to the index.
2. `install` trusts the key of the index alone. The wheel must have the digest of the index, its code the digest of the report, and the report
   must have passed. Only then does pip run. pip gets the requirements of the package from the user's package index as always, or,
   without requirements, nothing from anywhere.

An installed environment is an entry point, so `env.name = "NAME"` finds it, and its digest is compared by all processes of a run.
"""

import json
import pathlib
import sys
import tempfile

from inference.rollouts import rollout as rollout_lib
from rl.envs.hub import index as index_lib
from rl.envs.hub import manifest as manifest_lib
from rl.envs.hub import report as report_lib
from rl.envs.packages import installation
from sharding.system import files as files_lib


def publish(
    source: pathlib.Path,
    index: pathlib.Path,
    key: rollout_lib.WorkerKey,
    report: pathlib.Path,
    wheel: pathlib.Path | None,
) -> str:
    """Adds the package in the folder `source` to an index. Returns "NAME@VERSION, digest of its wheel".

    `wheel` is its wheel, if it is built already. Raises ValueError if the report did not pass or is about other code, or the version is taken.
    """
    manifest, checked = manifest_lib.read(source), report_lib.read(report)
    if not report_lib.passed(checked):
        raise ValueError(f"{report} did not pass; correct the environment and check it again")
    options = checked["environment"]["options"]
    with tempfile.TemporaryDirectory(prefix="intellax-publish-") as folder:
        out = pathlib.Path(folder)
        wheel = wheel or manifest_lib.build(source, out)
        manifest_lib.unpack(wheel, out / "unpacked")
        digests = {
            str(report): checked["environment"]["digest"],
            str(source): manifest_lib.digest(manifest, source, options),
            wheel.name: manifest_lib.digest(manifest, out / "unpacked", options),
        }
        if len({*digests.values()}) > 1:
            found = ", ".join(f"{name} {digest[:16]}" for name, digest in digests.items())
            raise ValueError(f"the code differs ({found}); check this folder again, and let the wheel have all files")
        if checked["kind"]["declared"] != manifest.kind:
            kinds = f"{manifest.kind}, and its code has {checked['kind']['declared']}"
            raise ValueError(f"{source}: tool.intellax.env.kind is {kinds}; correct one of them")
        data, stem = wheel.read_bytes(), f"{manifest.name}-{manifest.version}"
        entry = {
            "wheel": f"wheels/{wheel.name}",
            "sha256": files_lib.sha256(wheel),
            "digest": digests[str(source)],
            "report": f"reports/{stem}.json",
            "kind": checked["kind"]["tested"],
            "summary": manifest.summary,
            "function": manifest.function,
            "tags": [*manifest.tags],
            "requires": [*manifest.requires],
        }
        files = {entry["wheel"]: data, entry["report"]: report.read_bytes()}
        index_lib.add(index, key, manifest.name, manifest.version, entry, files)
    return f"{manifest.name}@{manifest.version}, wheel {entry['sha256']}"


def install(found: index_lib.Index, name: str, target: pathlib.Path | None, *, dry: bool = False) -> str:
    """Installs "NAME" or "NAME@VERSION" from an index; returns "NAME@VERSION, digest of its code". Blocks while pip runs.

    `target` is a folder for `--code`, in place of this interpreter. With `dry`, all is verified and nothing installed. Raises ValueError if the
    wheel or its report is not that of the index, or pip fails.
    """
    name, _, version = name.rpartition("/")[2].partition("@")
    version, entry = found.entry(name, version)
    with tempfile.TemporaryDirectory(prefix="intellax-install-") as folder:
        wheel = pathlib.Path(folder) / pathlib.PurePosixPath(entry["wheel"]).name
        wheel.write_bytes(found.fetch(entry["wheel"]))
        if (digest := files_lib.sha256(wheel)) != entry["sha256"]:
            expected = f"{digest[:16]}, and the index has {entry['sha256'][:16]}"
            raise ValueError(f"{name}@{version}: the wheel has the SHA-256 {expected}; get it from another place")
        manifest_lib.unpack(wheel, pathlib.Path(folder) / "unpacked")
        options = _checked_options(found, name, version, entry)
        manifest = manifest_lib.Manifest(name, version, entry["function"], entry["kind"], "", (), options, ())
        manifest_lib.check(manifest, found.place)
        if manifest_lib.digest(manifest, pathlib.Path(folder) / "unpacked", options) != entry["digest"]:
            raise ValueError(f"{name}@{version}: the wheel has other code than its report; let its publisher check it")
        if not dry:
            _pip(wheel, target, has_requirements=bool(entry.get("requires")))
    return f"{name}@{version}, digest {entry['digest']}"


def _checked_options(found: index_lib.Index, name: str, version: str, entry: dict) -> dict:
    """Returns the options with which an entry was checked. Raises ValueError unless its report passed, on the code of the entry."""
    try:
        report = report_lib.verified(json.loads(found.fetch(entry["report"], report_lib.MAX_BYTES)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}@{version}: the report cannot be used: {error}") from None
    if not report_lib.passed(report) or report["environment"]["digest"] != entry["digest"]:
        raise ValueError(f"{name}@{version}: its report did not pass, or is about other code; choose another version")
    return report["environment"]["options"]


def _pip(wheel: pathlib.Path, target: pathlib.Path | None, *, has_requirements: bool) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += [] if has_requirements else ["--no-deps", "--no-index"]
    command += ["--upgrade", "--target", str(target)] if target else ["--force-reinstall"] * (not has_requirements)
    failed = f"pip cannot install {wheel.name}; correct its requirements, or use --target"
    installation.run([*command, str(wheel)], failed)
