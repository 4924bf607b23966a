"""Finds, imports, and hashes a user's own functions, which no package of the checkout has to know.

1. A name is "module:function" or "path/to/file.py:function". `locate` finds its file: anywhere for a command that its owner starts, and
   only in the given `folders` for a process that works for the run of others, whose names are data from a stranger.
2. `load` imports the file as a part of its package, if it is in one. It comes last on the import path, so that it hides no module.
3. `digest` hashes the files that decide the result: all of the package, or the one file, the modules beneath the same folder that
   they import, and data. Installed packages that they import are not followed, nor compiled modules and names computed at run time.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import pkgutil
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence

from sharding.system import files as files_lib
from sharding.system import text as text_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]
STANDARD = pathlib.Path(inspect.__file__).parent  # of the library of Python, which its release covers
OURS = ("configs", "inference", "models", "rl", "sharding")  # at ROOT; the user's code depends on their release
MAX_ERROR_CHARS = 300  # of an exception's text, which may repeat a completion
Folders = Sequence[str | pathlib.Path] | None


def is_name(text: str) -> bool:
    """Returns True if a text is in the form of a user's function: "module:function" or "file.py:function"."""
    place, _, function = text.rpartition(":")
    return bool(place) and function.isidentifier()


def locate(name: str, folders: Folders = None) -> str:
    """Returns the name of a function in the form "/absolute/file.py:function". Raises ValueError if there is no such file.

    None as `folders` allows any file and the whole import path.
    """
    place, _, function = name.rpartition(":")
    if not is_name(name):
        raise ValueError(f"{name!r} does not name a function; write module:function, or path/to/file.py:function")
    return f"{find(place, folders) if place.endswith('.py') else _module_file(place, folders)}:{function}"


def find(path: str, folders: Folders = None) -> pathlib.Path:
    """Returns the absolute path of a file or folder. In `folders`, a path of another machine is found by its last part.

    Raises ValueError if it does not exist, or is not in `folders`, or is in several alike.
    """
    wanted = pathlib.Path(path).expanduser()
    inside = [pathlib.Path.cwd()] if folders is None else [pathlib.Path(folder).resolve() for folder in folders]
    parts = [wanted] if folders is None else [wanted, pathlib.Path(wanted.name)]
    for part in parts:
        places = {(folder / part).resolve() for folder in inside}
        if folders is not None:
            places = {place for place in places if any(place.is_relative_to(folder) for folder in inside)}
        if found := [place for place in places if place.exists()]:
            return _only(wanted, found)
    raise ValueError(f"{path!r} does not exist{_where(folders)}")


def load(name: str) -> Callable:
    """Returns the function of this name, from anywhere. Raises ValueError if its file fails or has no such function."""
    place, _, function = locate(name).rpartition(":")
    root, module = _module_of(pathlib.Path(place))
    if str(root) not in sys.path:
        sys.path.append(str(root))
        importlib.invalidate_caches()
    try:
        imported = pkgutil.resolve_name(f"{module}:")
    except (Exception, SystemExit) as error:  # foreign code may raise anything, and a script ends the process
        raise ValueError(f"{place} cannot be imported: {describe(error)}; correct it") from error
    other = getattr(imported, "__file__", None) or f"{module} of Python itself"
    if pathlib.Path(other).resolve() != pathlib.Path(place):
        raise ValueError(f"{place} has the name of another module, {other}; rename it")
    for key, file in code_files(f"{place}:").items():
        name = key.removesuffix(".py").removesuffix("/__init__").strip("/").replace("/", ".")
        other = getattr(sys.modules.get(name), "__file__", None)
        if other and pathlib.Path(other).resolve() != file.resolve() and name.partition(".")[0] not in OURS:
            raise ValueError(f"{place} needs the module {name} in {file}, but {other} is loaded; rename one of the two")
    if not callable(found := getattr(imported, function, None)):
        raise ValueError(f"{place} has no function {function!r}; correct the name")
    return found


def folders_of(name: str) -> list[str]:
    """Returns the folders in which another process of this machine finds the code of a located name, whole packages included."""
    file = pathlib.Path(name.rpartition(":")[0])
    return [*dict.fromkeys((str(_module_of(file)[0]), str(file.parent)))]


def code_files(name: str) -> dict[str, pathlib.Path]:
    """Returns {path relative to the import root: file} of all code and other files on which a located name depends."""
    root, module = _module_of(pathlib.Path(name.rpartition(":")[0]))
    is_installed = root.name in ("site-packages", "dist-packages") or root == STANDARD
    found: dict[str, pathlib.Path] = {}
    todo = [module.partition(".")[0]]
    seen: set[str] = {*OURS} - {*todo} if root == ROOT else set()
    while todo:
        if (top := todo.pop()) in seen:
            continue
        seen.add(top)
        is_package, module = (root / top / "__init__.py").exists(), root / f"{top}.py"
        own = {"": module} if module.exists() and not is_package else files_in(root / top)
        if not is_package:  # a folder without this file is a package, too, but may have anything else in it
            own = {relative: file for relative, file in own.items() if file.suffix == ".py"}
        for relative, file in own.items():
            if file.exists():
                found[f"{top}/{relative}"] = file
                todo += _imported(file) if file.suffix == ".py" and not is_installed else []
    return found


def files_in(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns {path relative to `path`: file} of all files in a folder but hidden and compiled ones; {"": path} for a file."""
    if not path.is_dir():
        return {"": path}
    found, above = {}, {path: {path.resolve()}}  # {folder: where it and those above it are}
    for folder, names, own in os.walk(path, followlinks=True):  # an import follows them, too
        place = pathlib.Path(folder)
        shown = [name for name in names if not name.startswith(".") and name != "__pycache__"]
        targets = {name: (place / name).resolve() for name in shown}
        # A link to a folder above would have no end.
        inner = {name: target for name, target in targets.items() if target not in above[place]}
        above |= {place / name: above[place] | {target} for name, target in inner.items()}
        names[:] = sorted(inner)
        files = (place / name for name in own if not name.startswith("."))
        found |= {file.relative_to(path).as_posix(): file for file in files if file.is_file()}
    return found


def digest(files: Iterable[tuple[str, pathlib.Path]], *texts: str) -> str:
    """Returns the SHA-256 (hex) over names and contents of files, and over `texts`. A file that does not exist counts as such."""
    total = hashlib.sha256()
    for name, path in sorted(files, key=lambda pair: pair[0]):
        content = files_lib.sha256(path) if path.is_file() else "absent"
        total.update(f"{name}\0{content}\n".encode())
    total.update("\0".join(texts).encode())
    return total.hexdigest()


def describe(error: BaseException) -> str:
    """Returns an exception as one printable line with its type, text, file and line number."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text_lib.printable(text)[:MAX_ERROR_CHARS] + where


def check_arguments(function: Callable, name: str, form: str, count: int) -> None:
    """Raises ValueError if a function cannot be called with `count` arguments, as `form` shows it."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        raise ValueError(f"{name} cannot be called as {form}: {error}; change its arguments") from None


def _module_file(module: str, folders: Folders) -> pathlib.Path:
    top, *rest = module.split(".")
    roots = [*map(pathlib.Path, folders or ())]
    if folders is None:
        try:
            spec = importlib.util.find_spec(top)
        except ValueError:  # a module without a spec, such as __main__
            spec = None
        if spec:  # a folder without __init__.py has no origin
            roots = [pathlib.Path(path).parent for path in spec.submodule_search_locations or [spec.origin or ""]]
    found = []
    for base in (pathlib.Path(root, top, *rest) for root in roots):
        for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if file.is_file() and (folders is None or any(file.resolve().is_relative_to(x.resolve()) for x in roots)):
                if rest and not (file.parent / "__init__.py").exists():
                    raise ValueError(f"{file.parent} has no __init__.py, so {module} is in no package; create the file")
                if folders is None:
                    return file.resolve()
                found.append(file.resolve())
                break
    if found:
        return _only(pathlib.Path(module), {*found})
    raise ValueError(f"module {module!r} does not exist{_where(folders)}")


def _only(wanted: pathlib.Path, found: Collection[pathlib.Path]) -> pathlib.Path:
    """Returns the path whose last parts agree most with those of `wanted`. Raises ValueError if several do."""
    agreeing = {path: len(os.path.commonprefix([path.parts[::-1], wanted.parts[::-1]])) for path in found}
    most = max(agreeing.values())
    first, *others = sorted(path for path, num in agreeing.items() if num == most)
    if others:
        raise ValueError(f"{str(wanted)!r} may be {first} or {others[0]} (--code); leave out the folder with the other")
    return first


def _module_of(file: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Returns (folder for the import path, dotted name) of a file with code."""
    names, folder = [] if file.stem == "__init__" else [file.stem], file.parent
    while (folder / "__init__.py").exists():
        names, folder = [folder.name, *names], folder.parent
    return folder, ".".join(names)


def _imported(file: pathlib.Path) -> list[str]:
    """Returns the first parts of the names that a file imports, without those relative to its package."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # the import will fail, too
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return [name.partition(".")[0] for name in names]


def _where(folders: Folders) -> str:
    if folders is None:
        return " here or on the import path; correct the name, or add its folder with --code"
    if not folders:
        return " for this process; give the folder that has it with --code"
    return f" in {', '.join(map(str, folders))} (--code); add the folder that has it"
