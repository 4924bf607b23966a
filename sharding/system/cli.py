"""Parses the options of every command without a config, with one line per mistake; prints how it gets on; stops it with its parent."""

import argparse
import ast
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from sharding.system import retries
from sharding.system import text as text_lib

STATUS_S, MAX_STATUS_S = 30.0, 600.0  # between two status lines, and of those that repeat the last


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that reports an unknown option before a missing one: it may be the same, mistyped.

    `description` may be a module's docstring; the help shows its first line.
    """

    def __init__(self, *args: Any, description: str | None = None, **options: Any):
        super().__init__(*args, description=(description or "").partition("\n")[0], **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parses like argparse; exits with code 2 on an unknown option, and names the most similar one."""
        args = sys.argv[1:] if args is None else list(args)
        known = list(self._option_string_actions)
        for arg in args:
            if arg == "--" or (self._subparsers is not None and not arg.startswith("-")):
                break  # positional arguments, or the options of a subcommand, follow
            name = arg.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                self.error(f"unknown option {name}{text_lib.hint(name, known)}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Prints the mistake in one line, without argparse's usage lines, and exits with code 2."""
        self.exit(2, f"error: {message}; {self.prog} --help lists the options\n")


def json_object(text: str) -> dict:
    """Returns the value of an option that is a JSON object. Raises ArgumentTypeError for other text."""
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(f'{text} is not a JSON object; write it as {{"enable_thinking": false}}')


def folder(text: str) -> str:
    """Returns the value of an option that names a folder. Raises ArgumentTypeError if there is none."""
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is not a folder; correct it")
    return text


# Arguments of `add_argument` for an option with several folders, which may be repeated.
FOLDERS: dict[str, Any] = {"type": folder, "nargs": "+", "action": "extend", "default": [], "metavar": "FOLDER"}


def option(text: str, texts: Collection[str] = ()) -> tuple[str, object]:
    """Returns name and value of an argument OPTION=VALUE. Raises ValueError.

    The value is a Python literal, or else the text itself, as for the options `texts`.
    """
    name, is_set, value = text.partition("=")
    if not is_set or not name.isidentifier():
        raise ValueError(f"{text!r} is not an option; write OPTION=VALUE")
    with contextlib.suppress(ValueError, SyntaxError):
        return name, value if name in texts else ast.literal_eval(value)
    return name, value


def run(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    function: Callable[[argparse.Namespace], int] | None = None,
    errors: tuple[type[Exception], ...] = (),
) -> int:
    """Runs `function`, by default the function `run` of the chosen subcommand; returns its exit code, 130 after Ctrl-C.

    ValueError, OSError, and `errors` are printed in one line, and the exit code is 1.
    """
    args = parser.parse_args(argv)
    try:
        return (function or args.run)(args)
    except (ValueError, OSError, *errors) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def fail_for(mistakes: Iterable[str]) -> None:
    """Raises ValueError with all `mistakes`, if there are any: each becomes a line "error: ..." of the command."""
    if found := [*dict.fromkeys(mistakes)]:
        raise ValueError("\nerror: ".join(found))


def mistake(check: Callable[[], object]) -> list[str]:
    """Returns the message of the ValueError, or of the OSError about a file, that `check` raises, in a list, or []."""
    try:
        check()
    except ValueError as error:
        return [str(error)]
    except OSError as error:  # of a path that may not be read, or is too long
        if error.filename is None:
            raise
        return [f"{error.strerror}: {str(error.filename)[:200]!r}; correct the path"]
    return []


def note(line: str) -> None:
    """Prints a line for people to standard error."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def status_line(read: Callable[[], tuple[Mapping[str, float], str]], period_s: float = STATUS_S) -> Iterator[None]:
    """Prints a line to standard error every `period_s` of the block in which the counts change, and rarely in which they do not.

    `read` returns ({name: count since the start}, the thing that the process waits for or "").
    """
    ended = threading.Event()
    thread = threading.Thread(target=_print_status, args=(read, period_s, ended), name="status-line", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _print_status(read: Callable[[], tuple[Mapping[str, float], str]], period_s: float, ended: threading.Event) -> None:
    (last, _), last_s, shown, due_s = read(), time.monotonic(), "", 0.0
    pauses = retries.Backoff(period_s, MAX_STATUS_S)
    while not ended.wait(period_s):
        (counts, waiting_for), now_s = read(), time.monotonic()
        is_same = counts == last and waiting_for == shown
        if not is_same:
            pauses.reset()
        if not is_same or now_s >= due_s:
            note(status(counts, last, now_s - last_s, waiting_for))
            shown, due_s = waiting_for, now_s + pauses.next_s()
        last, last_s = dict(counts), now_s


def status(counts: Mapping[str, float], before: Mapping[str, float], seconds: float, waiting_for: str) -> str:
    """Returns a line such as "groups 120 (3.4/s); waiting for a group" from the `counts` now and those `seconds` `before`."""
    rates = {name: (count - before.get(name, 0)) / seconds for name, count in counts.items()}
    parts = [f"{name} {counts[name]:,.0f} ({rate:,.1f}/s)" for name, rate in rates.items()]
    return ", ".join(parts) + (f"; waiting for {waiting_for}" if waiting_for else "")


async def run_until_signal(work: Callable[[Any], Awaitable[None]]) -> None:
    """Awaits `work(stopping)`. The first SIGINT or SIGTERM sets the event, and the next one ends the process. Threads but the main one get none."""
    import asyncio  # here: commands without it start faster

    stopping, loop, numbers = asyncio.Event(), asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        stopping.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            loop.add_signal_handler(number, stop)
    await work(stopping)


def stop_at_eof(stop: Callable[[], object]) -> None:
    """Starts a thread that calls `stop` when standard input closes (the parent process ended) and exits the process 5 s later."""

    def wait():
        while os.read(0, 4096):
            pass
        stop()
        time.sleep(5)
        os._exit(0)  # a request that does not end must not keep an orphan alive

    threading.Thread(target=wait, name="stop-at-eof", daemon=True).start()
