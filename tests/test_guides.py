"""The guides are short and of one form, their commands run as they are written, and each error that a page names is one of the product."""

import ast
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from configs import base
from rl.swarm.orchestrator.groups import queue_entry
from tests.rl import test_finetune
from tests.support import pages, tiny_run

ROOT = tiny_run.ROOT
DOCS = ROOT / "docs"
GUIDES = {path.stem: path.read_text() for path in sorted((DOCS / "guides").glob("*.md"))}
WITH_COMMANDS = [name for name, text in GUIDES.items() if "```bash" in text]
PRODUCT = ("rl", "inference", "models", "sharding")
NOT_OURS = ("ModuleNotFoundError", "RESOURCE_EXHAUSTED")  # texts of Python and of XLA
# Programs of the user in place of the real ones. `python` makes each run small: the last value of a field counts.
PYTHON = """
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && touch "$3/bin/activate" ;;
  *--config=*) exec {python} "$@" {fields} ;;
  *) exec {python} "$@" ;;
esac
"""
HOSTS = """
for command; do :; done
export JAX_COORDINATOR_ADDRESS=127.0.0.1:{port} JAX_NUM_PROCESSES=2 JAX_NUM_CPU_DEVICES=1
case "$command" in *rl.doctor*) unset JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES; exec bash -c "$command" ;; esac
JAX_PROCESS_ID=1 bash -c "$command" & other=$!
JAX_PROCESS_ID=0 bash -c "$command" && wait $other
"""
SMALL = {name: value for name, value in tiny_run.TINY.items() if not name.startswith("env.")}
FIELDS = {
    "gpu": test_finetune.TINY,
    "pod": tiny_run.TINY | {"mesh.fsdp": 2},
    "environment": SMALL,
}


def templates():
    """All texts of the product, with {} for each value."""
    for path in (path for top in PRODUCT for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"\{[^{}]*\}", "{}", node.value)


def symptoms(text):
    """The texts in code font of the first column of the tables about symptoms."""
    tables = re.findall(r"^\| (?:symptom|you see) \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return [found for cell in cells for found in re.findall("`([^`]+)`", cell) if not found.startswith(NOT_OURS)]


def missing(texts, known):
    """Those of `texts` that are in none of `known`, where "..." stands for anything."""
    patterns = {one: ".*".join(map(re.escape, filter(None, re.split(r" ?\.\.\. ?", one)))) for one in texts}
    return [one for one, pattern in patterns.items() if not any(re.search(pattern, text, re.DOTALL) for text in known)]


def test_each_symptom_is_a_text_of_the_product():
    page = (DOCS / "troubleshooting.md").read_text()
    named = [found for text in (page, *GUIDES.values()) for found in symptoms(text)]
    assert len(named) > 50 and len(symptoms(page)) > 35
    assert missing(named, {*templates()}) == []


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_is_one_page_of_one_form(name):
    text = GUIDES[name]
    assert re.findall("^## (.*)", text, re.MULTILINE) == ["You should see", "If not"]
    assert (
        sum(bool(line.strip()) for line in text.splitlines()) <= 75
        and f"guides/{name}.md" in (ROOT / "README.md").read_text()
    )
    assert symptoms(text)


def test_the_commands_of_all_pages_name_modules():
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for module in re.findall(r"python -m ((?:rl|inference|models|sharding|bench)[\w.]*)", page.read_text()):
            path = ROOT.joinpath(*module.split("."))
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (page.name, module)


def test_the_commands_of_all_pages_set_fields_that_exist():
    config, found = base.get_config(), set()
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        found |= {*re.findall(r"--config\.([a-z][a-z0-9_.]*)=", page.read_text())}
    assert len(found) > 40
    free = ("env.options.", "loss_options.", "chat_template_kwargs.")
    for name in (name for name in found if not name.startswith(free)):
        functools.reduce(lambda at, part: at[part], name.split("."), config)  # else a KeyError with the name


def test_the_picture_of_a_groups_life_has_the_transitions_of_the_queue():
    (text,) = re.findall(r"stateDiagram-v2\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)
    drawn = {tuple(edge) for edge in re.findall(r"^ +(\S+) --> ([\w*\[\]]+)", text, re.MULTILINE)}
    edges = {(state.value, to.value) for state, targets in queue_entry.NEXT.items() for to in targets}
    assert drawn == edges | {("[*]", "open"), ("eligible", "taken"), ("taken", "[*]")}


def script(name, folder):
    """The commands of a guide in their order, for small runs in `folder`; makes the files and programs that they need."""
    text = GUIDES[name]
    for file, code in pages.files(text).items():
        (folder / file).write_text(code)
    for top in ("configs", "examples"):
        (folder / top).symlink_to(ROOT / top)
    commands = "".join(code for language, code in pages.blocks(text) if language == "bash")
    commands = commands.replace("configs/qwen3_0_6b_gsm8k.py", "configs/quickstart.py").replace("/shared/", "shared/")
    if "Qwen/Qwen3-0.6B" in commands:
        stand_in = test_finetune.checkpoint(folder / "checkpoint")
        settings = json.loads((stand_in / "tokenizer_config.json").read_text())
        settings["chat_template"] += "{% if enable_thinking %}{% endif %}"  # a variable of Qwen3's
        (stand_in / "tokenizer_config.json").write_text(json.dumps(settings))
        commands = commands.replace("Qwen/Qwen3-0.6B", str(stand_in))
    for port in sorted({*re.findall(r"\b1[89]\d{3}\b", commands)}):
        commands = commands.replace(port, free_port())
    fields = " ".join(f"--config.{key}={value}" for key, value in FIELDS.get(name, tiny_run.TINY).items())
    python = PYTHON.format(python=sys.executable, fields=fields)
    programs = {"python": python, "python3": python, "pip": "", "gcloud": HOSTS.format(port=free_port())}
    (folder / "bin").mkdir()
    for program, body in programs.items():
        (folder / "bin" / program).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / program).chmod(0o755)
    return f"set -e\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n{commands}"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return str(sock.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_the_commands_of_a_guide_work(name, tmp_path):
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    variables["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    (tmp_path / "script").write_text(script(name, tmp_path))
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            ["bash", "script"], cwd=tmp_path, env=variables, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(1200)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
    text = (tmp_path / "out").read_text()
    assert code == 0, text[-4000:]
    for workdir in re.findall(r"rl\.(?:train|swarm) .*?--workdir=([\w/]+)", (tmp_path / "script").read_text()):
        assert (tmp_path / workdir / "report.html").exists(), text[-2000:]
