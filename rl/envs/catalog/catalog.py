"""Environments by name: `load("reverse_text", max_length=5)` returns an `environment.Environment`.

A name is a key of ENVS, with a variant after a colon for some, such as "verifiers:wordle" (rl/envs/packages/package.py); an entry point
of the group "intellax.environments" of an installed package; or a function of the user: "module:function", "path/to/file.py:function". rl/envs/interface/environment.py explains how to write one, with an example. Nothing in this
folder imports jax, so a rollout worker starts in about a second.
"""

import contextlib
import dataclasses
import inspect
import os
import pathlib
import sys
import types
from collections.abc import Callable, Collection, Iterable
from importlib import metadata
from typing import Any

from rl.envs.interface import environment
from rl.envs.native import dataset, gsm8k, logic, proof, reasoning, reverse_text, rewards
from rl.envs.native.games import user_sim, wordle
from rl.envs.native.genesys import genesys
from rl.envs.native.programs import coding, python_tool, rlm, speedrun, swe_toy
from rl.envs.native.retrieval import folding, search
from rl.envs.packages import package as package_lib
from rl.envs.wrappers import budget, ladder, solve_rate
from rl.learning.data import sources
from rl.protocol import env_mix, user_code
from sharding.system import cli
from sharding.system import text as text_lib

OURS = ("rl.envs.", "rl.learning.data.")  # modules that a digest covers
GROUP = "intellax.environments"  # of entry points
CODE_HELP = "folders with the run's own environment and its data; nothing of them is loaded from elsewhere"


@dataclasses.dataclass(frozen=True)
class Shipped:
    """An environment of this release, and facts about it that do not depend on its options."""

    # Its keyword arguments are the options `env.options` of a config. A positional argument gets the text after a colon:
    # "reasoning_gym:chain_sum" calls build("chain_sum").
    build: Callable[..., environment.Environment]
    # from `path` to {name: file} that it reads
    files: Callable[[pathlib.Path], dict[str, pathlib.Path]] = user_code.files_in
    package: str = ""  # its version decides tasks or rewards
    is_one_turn: bool = False  # an episode is one call of the model
    is_endless: bool = True  # its tasks need not be counted


ENVS = {
    "reverse_text": Shipped(reverse_text.build, is_one_turn=True),
    "gsm8k": Shipped(gsm8k.build, gsm8k.files, is_one_turn=True),
    "dataset": Shipped(dataset.build, sources.files, is_one_turn=True, is_endless=False),
    "reasoning_gym": Shipped(reasoning.build, package="reasoning-gym", is_one_turn=True),
    "wordle": Shipped(wordle.build),
    "search": Shipped(search.build, search.files),
    "folding": Shipped(folding.build),
    "logic": Shipped(logic.build, package="reasoning-gym", is_one_turn=True),
    "math": Shipped(dataset.build_math, sources.files, "math-verify", is_one_turn=True, is_endless=False),
    "proof": Shipped(proof.build, is_one_turn=True),
    "user_sim": Shipped(user_sim.build),
    "code": Shipped(coding.build),
    "python_tool": Shipped(python_tool.build),
    "swe_toy": Shipped(swe_toy.build),
    "rlm": Shipped(rlm.build),
    "speedrun": Shipped(speedrun.build),
    "genesys": Shipped(genesys.build, sources.files, "math-verify", is_endless=False),
} | {name: Shipped(build) for name, build in package_lib.BUILDERS.items()}

# {option that every environment takes in addition to those of its builder, unless that has a parameter of this name: module that implements it}
WRAPPERS: dict[str, types.ModuleType] = {
    "solve_rate": solve_rate,  # (low, high): trains only on tasks whose measured pass rate is in the window
    "solve_rates_path": solve_rate,
    "budget": budget,  # asks for a number of tokens, and rewards it
    "budget_targets": budget,
    "budget_alpha": budget,
    "ladder": ladder,  # dict(OPTION=(v0, v1, ...)): builds the environment once per level of difficulty
}


def load(name: str, /, **options) -> environment.Environment:
    """Builds the environment `name` (the module docstring has the forms), with `options` as keyword arguments of its builder.

    Every environment also takes the options in WRAPPERS. Raises ValueError for a name or an option that does not exist, for code that fails, and for options that the builder rejects.
    """
    kind, _, variant = name.partition(":")
    is_ours = kind in ENVS
    build = ENVS[kind].build if is_ours else user_code.load(locate(name, {})[0])
    parameters = inspect.signature(build).parameters.values()
    options, wrapping = _split(options, parameters)
    if wrapping:
        return environment.checked(_wrapped(name, options, wrapping))
    if is_ours:
        check(name, options)
        try:
            return environment.checked(build(*[variant] * _takes_variant(kind), **options))
        except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # an option of another type
            found = f"environment {name} cannot be built with {options}: {user_code.describe(error)}"
            raise ValueError(f"{found}; correct env.options") from error
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters if parameter.name != "seed"]
        environment.check_options(f"environment {name}", options.keys() - {"seed"}, known)
        if "seed" not in inspect.signature(build).parameters:
            options.pop("seed", None)
    try:
        made = build(**options)
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise ValueError(f"environment {name} cannot be built: {user_code.describe(error)}; correct it") from error
    if not isinstance(made, environment.Environment):
        raise ValueError(
            f"the builder of environment {name} returned {type(made).__name__}; return a rl.envs.environment.Environment"
        )
    return environment.checked(dataclasses.replace(made, name=name))


def check(name: str, options: dict) -> None:
    """Raises ValueError for a variant, an option, or a file of rows that the shipped environment `name` does not have. Builds and reads nothing."""
    kind, _, variant = name.partition(":")
    if kind not in ENVS:
        return
    if variant and not _takes_variant(kind):
        raise ValueError(f"environment {name!r}: {kind} has no variants; write {kind!r}")
    parameters = inspect.signature(ENVS[kind].build).parameters.values()
    (own, _), found = _split(options, parameters), []
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters if parameter.name != "seed"]
        found += cli.mistake(lambda: environment.check_options(f"environment {kind}", own.keys() - {"seed"}, known))
    if ENVS[kind].files is sources.files and own.get("path"):
        found += cli.mistake(lambda: sources.check(own["path"]))
    if kind == "dataset" and not _reward(kind, own):
        found += cli.mistake(lambda: rewards.make(str(own.get("reward", "exact")), str(own.get("pattern", ""))))
    cli.fail_for(found)


def is_wrapped(options: Collection[str]) -> bool:
    """Returns True if one of these options of an environment asks for a wrapper, which may change the number of its tasks."""
    return not WRAPPERS.keys().isdisjoint(options)


def _split(options: dict, parameters: Iterable[inspect.Parameter]) -> tuple[dict, dict]:
    """Returns (options of the builder with these parameters, options of the wrappers)."""
    own = {parameter.name for parameter in parameters}
    wrapping = {name: value for name, value in options.items() if name in WRAPPERS and name not in own}
    return {name: value for name, value in options.items() if name not in wrapping}, wrapping


def _wrapped(name: str, options: dict, wrapping: dict[str, Any]) -> environment.Environment:
    """Returns the environment with these options, in the wrappers that `wrapping` asks for. Raises ValueError for wrong options."""
    if steps := wrapping.get("ladder"):
        env = ladder.of_levels([load(name, **options, **own) for own in ladder.levels(steps, options)])
    else:
        env = load(name, **options)
    if "solve_rate" in wrapping or "solve_rates_path" in wrapping:
        env = solve_rate.filtered(env, wrapping.get("solve_rate"), wrapping.get("solve_rates_path", ""))
    if unused := [option for option in wrapping if option.startswith("budget_") and "budget" not in wrapping]:
        found = f"env.options.{unused[0]} has no effect without env.options.budget"
        raise ValueError(f"{found}; set it to one of {', '.join(budget.KINDS)}")
    if "budget" in wrapping:
        targets, alpha = wrapping.get("budget_targets", ()), wrapping.get("budget_alpha", 0.0)
        env = budget.budgeted(env, wrapping["budget"], targets, alpha)
    return env


def _takes_variant(kind: str) -> bool:
    parameters = inspect.signature(ENVS[kind].build).parameters.values()
    return any(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


def texts(name: str) -> set[str]:
    """Returns the options of a shipped environment that are texts in any notation: the alphabet 1234 is not a number."""
    shipped = ENVS.get(name.partition(":")[0])
    parameters = inspect.signature(shipped.build).parameters.values() if shipped else ()
    return {parameter.name for parameter in parameters if parameter.annotation is str}


def locate(name: str, options: dict, folders: user_code.Folders = None) -> tuple[str, dict]:
    """Returns name and options with absolute paths for code and data, as `load` takes them in any process of this machine.

    Options named `path`, or with that ending, are data. With `folders`, code and data of the user come from there only: the names
    of a stranger's run must not choose files of this machine. Installed entry points are free. Raises ValueError if a file is missing,
    and for an option `seed`, which is the run's.
    """
    if "seed" in options:
        raise ValueError(f"env.options.seed = {options['seed']!r} is that of the run; remove it, and set seed")
    kind, located = name.partition(":")[0], name
    if kind not in ENVS:
        entries = [*metadata.entry_points(group=GROUP, name=name)]
        if not entries and not user_code.is_name(name):
            known = [*ENVS, *(entry.name for entry in metadata.entry_points(group=GROUP))]
            own = "or write module:function for your own"
            raise ValueError(
                f"environment {name!r} does not exist{text_lib.hint(kind, known)}; choose one of {', '.join(known)}, {own}"
            )
        located = user_code.locate(entries[0].value) if entries else _located("env.name", name, folders)
    found = _located_options(kind, options, folders)
    if steps := _ladder(options):
        found["ladder"] = {option: _located_levels(kind, option, values, folders) for option, values in steps.items()}
    return located, found


def located(config, folders: user_code.Folders = None) -> dict[str, env_mix.Entry]:
    """Returns the environments of a run (`env_mix.entries`) with located names and options. Raises ValueError as `locate` does."""
    found = {}
    for key, entry in env_mix.entries(config).items():
        with entry.naming_fields():
            name, options = locate(entry.name, entry.options, folders)
        found[key] = dataclasses.replace(entry, name=name, options=options)
    return found


def load_all(config) -> dict[str, environment.Environment]:
    """Builds the environments of a run, {"": the only one} for a run with one. Raises ValueError as `locate` and `load` do."""
    found = {}
    for key, entry in located(config).items():
        with entry.naming_fields():
            found[key] = load(entry.name, seed=config.seed, **entry.options)
    return found


def digest(name: str, options: dict) -> str:
    """Returns the SHA-256 (hex) over the code and data of an environment with located name and options, by which processes agree on it."""
    kind = name.partition(":")[0]
    if kind in package_lib.FRAMEWORKS:
        paths = [path for each in (options, *_levels(options)) for path in _paths(each).values()]
        data = [files for path in paths for files in user_code.files_in(pathlib.Path(path)).items()]
        return package_lib.digest(package_lib.find(name), options, data)
    shipped, version = ENVS.get(kind), ""
    if shipped:
        files = [(file.name, file) for file in sorted(_files_of(sys.modules[shipped.build.__module__]))]
    else:
        files = [*user_code.code_files(name).items()]
    for reward in _rewards(kind, options):
        files += user_code.code_files(reward).items()
    package, read = (shipped.package, shipped.files) if shipped else ("", user_code.files_in)
    if kind == "dataset" and options.get("reward") in rewards.WITH_MATH_VERIFY:
        package = "math-verify"
    if package:
        with contextlib.suppress(metadata.PackageNotFoundError):  # `load` reports it
            version = f"{package} {metadata.version(package)}"
    for module in dict.fromkeys(WRAPPERS[name] for name in sorted(options) if name in WRAPPERS):
        files += [(f"wrappers/{file.name}", file) for file in sorted(_files_of(module))]
    for each in (options, *_levels(options)):
        for option, path in _paths(each).items():
            data = user_code.files_in if option in WRAPPERS else read
            files += [(f"{option}/{name}", file) for name, file in data(pathlib.Path(path)).items()]
    return user_code.digest(files, version)


def check_digest(name: str, found: str, expected: str) -> None:
    """Raises ValueError if the code and data of an environment here (`found`) are not those of its run (`expected`)."""
    if found != expected:
        digests = f"(digest {found[:16]}) than in the run ({expected[:16]})"
        remedy = "get the run's release of Intellax, and its code and data in a folder of --code"
        raise ValueError(f"environment {name} has other code or data here {digests}; {remedy}")


def folders(name: str, options: dict) -> list[str]:
    """Returns the folders that another process of this machine must be allowed to read (`locate`) for a located name and options."""
    kind = name.partition(":")[0]
    code = [name] * (kind not in ENVS) + _rewards(kind, options)
    own = [folder for each in code for folder in user_code.folders_of(each)]
    paths = [path for each in (options, *_levels(options)) for path in _paths(each).values()]
    if kind in package_lib.FRAMEWORKS:
        paths += filter(os.path.exists, package_lib.absolute_paths(options))
    return [*dict.fromkeys([*own, *(str(pathlib.Path(path).parent) for path in paths)])]


def _located_levels(kind: str, option: str, values: Any, folders: user_code.Folders) -> Any:
    """Returns the values of an option that `ladder` sets, one per level, each as `_located_options` does."""
    if not isinstance(values, list | tuple):
        return values
    return [_located_options(kind, {option: value}, folders)[option] for value in values]


def _located_options(kind: str, options: dict, folders: user_code.Folders) -> dict:
    """Returns options with absolute paths for code and data. Raises ValueError as `locate` does."""
    found = dict(options)
    for option, path in _paths(options).items():
        try:
            found[option] = str(user_code.find(path, folders))
        except ValueError as error:  # `load` reports it, too
            if folders is not None:
                raise ValueError(f"env.options.{option} = {error}") from None
    if reward := _reward(kind, options):
        found["reward"] = _located("env.options.reward", reward, folders)
    if folders is not None and kind in package_lib.FRAMEWORKS:
        inside = [pathlib.Path(folder).resolve() for folder in folders]
        own = [(name, value) for name, value in found.items() if name != "ladder"]
        named = [(name, path) for name, value in own for path in package_lib.absolute_paths(value)]
        for option, path in named:  # its process would see them (rl/envs/foreign/isolation.py)
            if os.path.exists(path) and not any(pathlib.Path(path).resolve().is_relative_to(one) for one in inside):
                text = f"env.options.{option} has the path {path!r} of this machine"
                raise ValueError(f"{text}, which is in no folder of --code; add the folder that has it")
    return found


def _ladder(options: dict) -> Any:
    """Returns the options that the wrapper `ladder` sets, with their values; {} for none, and for a value that `load` refuses."""
    steps: Any = options.get("ladder")
    return steps if hasattr(steps, "items") else {}


def _located(field: str, name: str, folders: user_code.Folders) -> str:
    try:
        return user_code.locate(name, folders)
    except ValueError as error:
        raise ValueError(f"{field} = {name!r}: {error}") from None


def _reward(kind: str, options: dict) -> str:
    """Returns the name of the user's function that scores a dataset, or ""."""
    reward = str(options.get("reward", "")) if kind == "dataset" else ""
    return reward if user_code.is_name(reward) else ""


def _rewards(kind: str, options: dict) -> list[str]:
    """Returns the names of the user's functions that score a dataset, those of all levels."""
    return [reward for each in (options, *_levels(options)) if (reward := _reward(kind, each))]


def _levels(options: dict) -> list[dict]:
    """Returns each option that the wrapper `ladder` sets, with its value at each level."""
    lists = [(name, of) for name, of in _ladder(options).items() if isinstance(of, list | tuple)]
    return [{name: value} for name, values in lists for value in values]


def _paths(options: dict) -> dict[str, str]:
    names = [name for name in options if name == "path" or name.endswith("_path")]
    return {name: options[name] for name in names if isinstance(options[name], str) and options[name]}


def _files_of(module: types.ModuleType) -> set[pathlib.Path]:
    """Returns the files of a module and of those in OURS that it imports, and their DATA_FILES."""
    found, todo = set(), [module]
    while todo:
        one = todo.pop()
        if (file := pathlib.Path(str(one.__file__))) not in found:
            found |= {file, *getattr(one, "DATA_FILES", ())}
            todo += [x for x in vars(one).values() if inspect.ismodule(x) and x.__name__.startswith(OURS)]
    return found
