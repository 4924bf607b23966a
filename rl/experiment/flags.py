"""The flags of a command of `rl`: a config file, fields of it, a working directory. A mistake in them is told in one line.

A config file is a program of the user's, which may fail in any way; the line says where in it.
"""

import re
import sys
import traceback

from absl import flags
from ml_collections import config_flags

from rl.experiment import rules

CONFIG_HELP = (
    "the experiment, a file of configs/; --config.FIELD=VALUE sets a field of it (configs/base.py has all of them)"
)


def define(*, needs_workdir: bool = True, values: flags.FlagValues = flags.FLAGS) -> None:
    config_flags.DEFINE_config_file("config", None, CONFIG_HELP, lock_config=True, flag_values=values)
    if needs_workdir:
        words = "where the run lives: checkpoints, weights, rollouts, metrics, report"
        flags.DEFINE_string("workdir", None, words, flag_values=values)
    names = ["config", "workdir"] if needs_workdir else ["config"]
    flags.mark_flags_as_required(names, flag_values=values)
    for name in names:  # --help lists those of the main module
        values.register_key_flag_for_module(sys.argv[0], values[name])


def parse(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """absl's parser; returns the arguments that are no flags. ValueError: one line of value, rule and remedy."""
    try:
        rest = values(argv)
        _ = values.config.seed  # ml_collections reports a file that it could not load only when asked for a field
    except SystemExit:  # absl's after --help, as if that had been a mistake
        raise SystemExit(0) from None
    except Exception as error:
        raise ValueError(_explained(error)) from error
    rules.check_overrides(values.config, config_flags.get_override_values(values["config"]))
    return rest


def _explained(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no config file {error.filename}; configs/ holds the experiments"
    if isinstance(error, SyntaxError):
        return f"the config file cannot be read: {error.filename}, line {error.lineno}: {error.msg}"
    if isinstance(error, OSError):  # ml_collections' own, around that of the file
        return f"the config file cannot be read: {str(error).rpartition('] ')[2]}; configs/ holds the experiments"
    cause = error.args[0] if error.args else error
    if isinstance(cause, KeyError):  # the field, and on a second line "Did you mean ...?"
        cause = cause.args[0]
    text = str(cause).strip()
    if missing := re.findall(r"Flag --(\w+) must have a value other than None", text):
        return f"{' and '.join(f'--{name}' for name in missing)} must be given; --help tells the flags"
    if unknown := re.match(r'Key "(\w+)" does not exist and cannot be added', text):  # in a config file
        name, place = unknown[1], _place("".join(traceback.format_exception(error)))
        hint = re.search(r"Did you mean.*", text)
        return (
            f"{place}: the config has no field {name!r}; {hint[0] if hint else 'see configs/base.py for all of them'}"
        )
    if isinstance(cause, AttributeError | str) and "has no attribute 'get_config" in text:
        return "the config file has no function get_config(), which returns the config; see configs/quickstart.py"
    if "Traceback (most recent call last)" in text:  # of get_config, as ml_collections quotes it
        return _in_config_file(text)
    if not isinstance(error, (AttributeError, KeyError, TypeError, ValueError, flags.Error)):
        return _in_config_file("".join(traceback.format_exception(error)))
    field, _, hint = text.partition("\n")
    if isinstance(error, (AttributeError, KeyError)):
        name = field.strip("'\"")
        return f"the config has no field {name!r}; {hint or 'see configs/base.py for all of them'}"
    return text.replace("\n", " ")


def _in_config_file(trace: str) -> str:
    """Place and message of an error that was raised while a config file ran."""
    lines = [line for line in trace.strip().splitlines() if line.strip()]
    kind, _, words = lines[-1].partition(": ")
    return f"the config file cannot be used: {_place(trace)}: {words or kind}"


def _place(trace: str) -> str:
    """The last line of a traceback that is no library's."""
    places = re.findall(r'File "([^"]+)", line (\d+)', trace)
    file, line = next((p for p in reversed(places) if "site-packages" not in p[0]), ("?", "?"))
    return f"{file}, line {line}"
