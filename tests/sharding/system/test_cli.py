"""Every command reports a mistake in its options in one line with exit code 2; its help exits with 0. Status lines have rates."""

import itertools
import subprocess
import sys
import types

import pytest

from sharding.system import cli
from tests.support import commands, proxy, tiny_run

COMMANDS = (
    "bench.broadcast bench.cheats bench.forward bench.grpo_step bench.inference bench.inference_flips "
    "bench.inference_verify bench.load bench.logprobs bench.toploc inference.chat inference.serve models.hf "
    "rl.ledger rl.report rl.rollouts rl.validator rl.worker sharding.broadcast sharding.relay"
).split()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistyped_option_is_one_line(name, capsys):
    assert commands.run(name, "--hlep") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: unknown option --hlep (did you mean --help?); python -m ")


@pytest.mark.parametrize("name", ["inference.chat", "inference.serve"])
@pytest.mark.parametrize("text", ["[1]", "{", "true"])
def test_variables_of_the_template_are_an_object(name, text, capsys):
    assert commands.run(name, "--model", "nowhere", "--chat_template_kwargs", text) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{text} is not a JSON object; write it as" in line


def message(capsys, parser, *argv):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_mistyped_option_is_reported_before_a_missing_one(capsys):
    parser = cli.Parser(prog="python -m x")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--number", type=int)
    serve = parser.add_subparsers(dest="command", required=True).add_parser("serve")
    serve.add_argument("--port", type=int, required=True)
    end = "; python -m x --help lists the options"
    assert message(capsys, parser, "--wrokdir=a") == "error: unknown option --wrokdir (did you mean --workdir?)" + end
    assert message(capsys, parser, "--quite-another") == "error: unknown option --quite-another" + end
    assert message(capsys, parser, "--number=x").startswith("error: argument --number: invalid int value: 'x'")
    assert message(capsys, parser).startswith("error: the following arguments are required: --workdir, command")
    line = message(capsys, parser, "--workdir=a", "serve", "--prot", "1")
    assert line.startswith("error: unknown option --prot (did you mean --port?); python -m x ")
    args = parser.parse_args(["--work", "a", "serve", "--port=-1"])  # a prefix is enough, as in argparse
    assert (args.workdir, args.port) == ("a", -1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rl.train", "rl.sft", "rl.evaluate", "rl.export", "rl.plan"])
def test_help_of_the_commands_with_a_config_lists_their_flags(name):
    def run(*argv):
        return subprocess.run([sys.executable, "-m", name, *argv], cwd=tiny_run.ROOT, capture_output=True, text=True)

    helped, mistyped, missing = run("-h"), run("--wrokdir=x"), run()
    assert helped.returncode == 0 and "--config:" in helped.stdout and "--config.FIELD=VALUE" in helped.stdout
    assert ("--workdir:" in helped.stdout) == (name != "rl.plan")
    (line,) = mistyped.stderr.splitlines()
    assert mistyped.returncode == 2 and line.startswith("error: Unknown command line flag 'wrokdir'")
    (line,) = missing.stderr.splitlines()
    assert missing.returncode == 2 and line.startswith("error: --") and "--config" in line
    assert line.endswith(" must be given; --help lists the flags")


def test_lines_have_rates_and_a_wait_is_told_rarely(capsys, monkeypatch):
    """On a clock that goes on by a period with each line that may be due."""
    periods, counts, reads, lines = itertools.count(), {"groups": 0}, [], []
    monkeypatch.setattr(cli, "time", types.SimpleNamespace(monotonic=lambda: 0.02 * next(periods)))

    def read():
        reads.append(counts["groups"])
        return dict(counts), "a group" if counts["groups"] else ""

    def shown(line):
        lines.extend(capsys.readouterr().err.splitlines())
        return line in lines

    with cli.status_line(read, 0.02):
        proxy.wait_until(lambda: shown("groups 0 (0.0/s)") and len(reads) > 20)
        counts["groups"] = 5000
        proxy.wait_until(lambda: shown("groups 5,000 (0.0/s); waiting for a group"))
    assert lines[0] == "groups 0 (0.0/s)" and "groups 5,000 (250,000.0/s); waiting for a group" in lines
    assert len(lines) < len(reads) / 2
    assert cli.status({"tokens": 30.0}, {"tokens": 10.0}, 2.0, "") == "tokens 30 (10.0/s)"
