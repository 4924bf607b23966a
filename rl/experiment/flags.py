"""The flags of commands that read a config: a config file, its fields, and a work directory. A mistake becomes one line.

A config file is a program of the user, which may fail in any way; the line gives the place in it.
"""

import ast
import contextlib
import difflib
import functools
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags

from rl.experiment import base_fields, rules
from sharding.system import atomic_file, cli
from sharding.system import text as text_lib

PATHS = (  # fields with a path, or several with commas between them
    *("init_from", "tokenizer", "warmup.data", "objective.reference_model", "trust.bands", "trust.stake_ledger"),
    *("topology.compile_cache", "topology.control_token_file"),
)
OPEN_ENDED = r"^--?config\.((?:env\.options|chat_template_kwargs|envs\.\w+)\.[\w.]+)"  # fields that configs/base.py does not list
CONFIG_FILE = "config.json"  # of a run's working directory
CONFIG_HELP = (
    "the experiment, a file of configs/, or by default that of the run in --workdir; --config.FIELD=VALUE sets a field; "
    "all fields are listed below"
)
CODE_HELP = "a folder to import your own code from (environment, loss, advantage, metrics); may be repeated"
WORKDIR_HELP = "directory of the run, or its gs:// or s3:// URL: checkpoints, weights, rollouts, metrics, report"


class _NotARun(Exception):
    """Raised for a working directory without a config.json. Not a ValueError, before which absl puts the name of a flag."""


def define(*, needs_workdir: bool = True, values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the required command-line flags `--config` and, unless `needs_workdir` is False, `--workdir`."""
    config_flags.DEFINE_config_file("config", None, CONFIG_HELP, lock_config=True, flag_values=values)
    parser = values["config"].parser
    setattr(parser, "parse", functools.partial(_read_config, parser.parse))  # noqa: B010
    flags.DEFINE_multi_string("code", [], CODE_HELP, flag_values=values)
    if needs_workdir:
        flags.DEFINE_string("workdir", None, WORKDIR_HELP, flag_values=values)
    flags.DEFINE_bool("exit_with_parent", False, "stop when standard input closes", flag_values=values)
    for name in ("config", "workdir") if needs_workdir else ("config",):
        flags.mark_flag_as_required(name, flag_values=values)
    for name in {"config", "workdir", "code"} & {*values}:
        values.register_key_flag_for_module(sys.argv[0], values[name])  # --help lists those of the main module


def parse(
    argv: list[str], values: flags.FlagValues = flags.FLAGS, *, is_complete: bool = False, has_rollouts: bool = True
) -> list[str]:
    """Parses the command line; returns the program's name and the arguments that are not flags.

    Raises ValueError with all mistakes in it, and in the config (`rules.mistakes`), a line for each; with `is_complete`, also of
    environments, data, and checkpoints that do not exist. Without `has_rollouts`, fields that are for rollouts alone are not checked.
    Without --config, the config is that of the run in --workdir.
    """
    folder = os.path.expanduser((_values(argv, "workdir") or [""])[-1])
    file, has_help = os.path.join(folder, CONFIG_FILE), any(word.startswith(("-help", "--help")) for word in argv)
    is_of_run = bool(folder) and "://" not in folder and "workdir" in values and not _values(argv, "config")
    if is_of_run and (os.path.isfile(file) or not has_help):
        argv = [argv[0], f"--config={file}", *argv[1:]]
    try:
        sys.path += _values(argv, "code")  # before the config file, which may need it
        rest = values(argv)
        # ml_collections reports a file that it could not load only when a field is read. A shell keeps the ~ of --workdir=~/runs.
        for section, _, field in (name.rpartition(".") for name in PATHS):
            config = values.config[section] if section else values.config
            config[field] = re.sub(r"(?:^|(?<=,)) *~[^/,]*", lambda m: os.path.expanduser(m[0].strip()), config[field])
        for name in {"workdir", "output"} & {*values}:
            if path := values[name].value:
                values[name].value = os.path.expanduser(path)
    except SystemExit:  # of absl after --help, with the exit code of a mistake
        print(f"\nfields of the config, with their defaults in configs/base.py:\n{base_fields.listing()}")
        raise SystemExit(0) from None
    except Exception as error:
        found, config = _mistakes(error, argv, values)
        cli.fail_for([*found, *(_of_config(config, values, is_complete, has_rollouts) if config else ())])
    folders = [f"--code={folder} is not a folder; correct it" for folder in values.code if not os.path.isdir(folder)]
    unused = rules.without_effect(values.config, given(values))
    cli.fail_for([*folders, *unused, *_of_config(values.config, values, is_complete, has_rollouts)])
    return rest


def _of_config(
    config: config_dict.ConfigDict, values: flags.FlagValues, is_complete: bool, has_rollouts: bool
) -> Iterator[str]:
    yield from rules.mistakes(config, is_settled=False, has_rollouts=has_rollouts)
    if is_complete:
        yield from rules.mistakes_outside(config, values["workdir"].value or "" if "workdir" in values else "")


def given(values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Returns the dotted names of the config fields that the command line sets."""
    return list(config_flags.get_override_values(values["config"]))


def config_arguments(argv: list[str]) -> list[str]:
    """Returns the arguments that set the config, which are for the learner, too."""
    found, is_value = [], False
    for argument in argv:
        is_config = argument.startswith(("-config", "--config", "-code", "--code"))
        if is_config or is_value:
            found.append(argument)
        is_value = is_config and "=" not in argument
    return found


def _read_config(read: Callable[[str], Any], path: str) -> Any:
    """Returns the config of a file, with the fields of open-ended sections that the command line sets and the file does not.

    Options belong to an environment: if the command line names another one, those of the file are dropped.
    """
    config = _saved(path) if path.endswith(".json") else read(path)
    with contextlib.suppress(AttributeError):  # of another kind of config, which `parse` reports
        options, names = config.env.options, _values(sys.argv, "config.env.name")
        if names and names[-1] != config.env.name:
            for option in list(options):
                del options[option]
        for field in re.findall(OPEN_ENDED, "\n".join(sys.argv), re.MULTILINE):
            section, (*sections, last) = config, field.split(".")
            for name in sections:
                if name not in section:
                    section[name] = config_dict.ConfigDict()
                section = section[name]
            if last not in section:
                section[last] = _typed(config, field)
    return config


def _typed(config: config_dict.ConfigDict, field: str) -> Any:
    """Returns the value that the command line sets for a field of an open-ended section. An option of an environment may be a text."""
    text = _values(sys.argv, f"config.{field}")[-1]
    owner, is_option, option = field.partition(".options.")
    if is_option:
        from rl import envs  # here: it takes half a second

        section = functools.reduce(config_dict.ConfigDict.__getitem__, owner.split("."), config)
        name = (_values(sys.argv, f"config.{owner}.name") or [section.get("name", "")])[-1]
        if option in envs.texts(name):
            return text
    return _literal(text)


def _saved(path: str) -> config_dict.ConfigDict:
    """Returns the config in the config.json of a run. Raises `_NotARun` if it does not exist, and ValueError if it has no config, or functions of a config file."""
    folder, name = os.path.split(path)
    if name == CONFIG_FILE and not os.path.exists(path):
        raise _NotARun(f"workdir {folder} has no {name}: it is not a run; correct it, or give --config")
    if not (saved := atomic_file.read_json(pathlib.Path(path), dict).get("config")):
        raise ValueError(f"{path} is not the config.json of a run; give that, or a file of configs/")
    if saved["rl"]["loss_function"]:
        raise ValueError(f"the run of {path} has functions of its config file; give that file")
    for name, default in base_fields.flat(base_fields.config().to_dict()).items():
        if isinstance(default, tuple):  # a list in JSON
            section, *sections, field = name.split(".")
            values = functools.reduce(dict.__getitem__, sections, saved[section])
            values[field] = tuple(values[field])
    return config_dict.ConfigDict(saved)


def _values(argv: list[str], name: str) -> list[str]:
    """Returns the texts that a flag is set to in `argv`, as --NAME=TEXT or --NAME TEXT."""
    found = []
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, is_set, text = argument.partition("=")
        if flag in (f"--{name}", f"-{name}"):
            found.append(text if is_set else following if following and following[0] != "-" else "true")
    return found


def _literal(text: str) -> Any:
    """Returns a number, a truth value, or a tuple of them for a text in Python's notation, else the text."""
    with contextlib.suppress(ValueError, SyntaxError):
        if isinstance(value := ast.literal_eval(text), (bool, int, float, tuple)):
            return value
    return {"true": True, "false": False}.get(text, text)


def _mistakes(
    error: Exception, argv: list[str], values: flags.FlagValues
) -> tuple[list[str], config_dict.ConfigDict | None]:
    """Returns a line for each mistake of a command line that could not be parsed because of `error`, and the config that the rest of it sets.

    The config is None if its file is the mistake.
    """
    first, files = _explained(error), _values(argv, "config")
    try:
        config: Any = values["config"].parser.parse(files[-1])
        fields = base_fields.flat(config.to_dict())
    except Exception:  # of the user's file, or there is none; `first` is about it
        return [first], None
    found = []
    known = [f"--{name}" for name in values] + [f"--config.{name}" for name in base_fields.names(config)]
    for argument in argv[1:]:
        name, is_set, text = argument.partition("=")
        name = re.sub("^--?", "--", name)
        field = name.removeprefix("--config.")
        if not argument.startswith("-") or field.startswith(("env.options.", "envs.")):
            continue
        if name not in known and name.replace("--no", "--", 1) not in known:
            near = text_lib.hint(f"--config.{name[2:]}", known) or text_lib.hint(name, known)
            starts = [field[: match.start()] for match in re.finditer(r"\.|$", field)]
            start = next((start for start in starts if f"--config.{start}" not in known), field)
            is_field = name.startswith("--config.")
            found += [_no_field(start, config) if is_field else f"flag {name} is unknown{near}; --help lists the flags"]
        elif field in fields and is_set:
            kind = type(fields[field])
            if kind is bool and text.lower() not in ("true", "false", "1", "0"):
                found.append(f"flag {name}={text}: it is neither true nor false; correct it")
                continue
            try:
                config.update_from_flattened_dict({field: kind(text) if kind in (int, float, str) else _literal(text)})
            except (ValueError, TypeError):
                rule = f"its type is {kind.__name__}; write it in Python's notation, as {fields[field]!r}"
                found.append(f"flag {name}={text}: {rule}")
    # absl stops at the first mistake, which is mostly one of those that were found.
    return found or [first], config


def _explained(error: Exception) -> str:
    """Returns one line on an error of absl, of ml_collections, or of the config file."""
    if isinstance(error, _NotARun):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"the config file has a syntax error: {error.filename}, line {error.lineno}: {error.msg}; correct it"
    if isinstance(error, FileNotFoundError):
        return _no_file(str(error.filename))
    if isinstance(error, OSError):  # of ml_collections, around that of the file
        reason, _, file = str(error).rpartition("] ")[2].partition(": ")
        return _no_file(file.strip("'")) if file else f"the config file cannot be read: {reason}; choose another"
    cause = error.args[0] if error.args else error
    if isinstance(cause, KeyError):  # the field, and on a second line the most similar one of its section
        cause = cause.args[0]
    text, trace = str(cause).strip(), "".join(traceback.format_exception(error))
    if missing := re.findall(r"Flag --(\w+) must have a value other than None", text):
        return f"{' and '.join(f'--{name}' for name in missing)} must be given; --help lists the flags"
    if unknown := re.match(r'Key "(\w+)" does not exist and cannot be added', text):  # in a config file
        return f"{_place(trace)}: {_no_field(unknown[1], base_fields.config())}"
    if isinstance(cause, AttributeError | str) and "has no attribute 'get_config" in text:
        return "the config file does not define get_config(), which returns the config; copy configs/quickstart.py"
    if "Traceback (most recent call last)" in text:  # of get_config, as ml_collections quotes it
        return _in_config_file(text)
    if not isinstance(error, (AttributeError, KeyError, TypeError, ValueError, flags.Error)):
        return _in_config_file(trace)
    return text.replace("\n", " ")


def _no_field(name: str, config: config_dict.ConfigDict) -> str:
    near = text_lib.hint(name, base_fields.names(config))
    return f"the config has no field {name!r}{near}; --help lists all fields"


def _no_file(name: str) -> str:
    path, is_folder = pathlib.Path(name), os.path.isdir(name)
    folder = path if is_folder else path.parent if path.parent.is_dir() else "configs"
    known = [str(file) for file in path.parent.glob("*.py") if not file.stem.startswith("_")]
    near = "".join(f" (did you mean {file}?)" for file in difflib.get_close_matches(f"{path}.py", known, 1))
    return f"config file {name} {'is a folder' if is_folder else 'does not exist'}{near}; choose one of {folder}/"


def _in_config_file(trace: str) -> str:
    """Returns the place and message of an error that was raised while a config file ran."""
    lines = [line for line in trace.strip().splitlines() if line.strip()]
    kind, _, words = lines[-1].partition(": ")
    return f"the config file failed: {_place(trace)}: {words or kind}"


def _place(trace: str) -> str:
    """Returns the file and line of the innermost frame of a traceback that is not in a library."""
    places = re.findall(r'File "([^"]+)", line (\d+)', trace)
    file, line = next((p for p in reversed(places) if "site-packages" not in p[0]), ("?", "?"))
    return f"{file}, line {line}"
