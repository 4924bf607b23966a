"""The first and the last step of a command with a config: parse and check its flags, and report the mistakes of the user.

1. `parse` runs before the imports of the command, which take seconds (JAX, Flax, Orbax): mistakes that need no model and no data are printed within
   a second, all of them, a line each.
2. `run` calls the command. A user's mistake exits with a line on standard error and a non-zero code; an error that a library raised keeps its traceback.
"""

import contextlib
import errno
import logging
import os
import pathlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from absl import app, flags

from sharding.system import cli
from sharding.system.multihost import failure

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Errors of a disk or a path, which are not bugs even where a library raised them.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BAD_PATH = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
OUTSIDE = (*FULL_DISK, *BAD_PATH, errno.EIO)
SHOW_CURSOR = b"\x1b[?25h"
REPEAT_S = 0.1  # until a signal is raised again whose error was ignored
PATIENCE_S = 3.0  # after Ctrl-C, until a line with the reason why the process goes on
_before_leaving: list[Callable[[], object]] = []
LESS_MEMORY = "lower inference.num_slots or train.rows, or set them to 0: chosen for the memory"


def parse(*, needs_workdir: bool = True, is_complete: bool = False, has_rollouts: bool = True) -> None:
    """Parses `--config`, `--workdir` (if needed), and the flags that are defined; exits with code 2 and a line for each mistake.

    The first argument may be the working directory alone, as in `rl.export runs/sums --output=DIR`. `is_complete` and `has_rollouts` are those of `flags.parse`.
    """
    # An import that Ctrl-C interrupts may hide it, as those of extension modules do; there is nothing to save yet.
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is default:
            signal.signal(number, _leave)
    from rl.experiment import flags as command_line  # takes half a second

    command_line.define(needs_workdir=needs_workdir)
    if "workdir" in flags.FLAGS and sys.argv[1:] and sys.argv[1][:1] not in ("", "-"):
        sys.argv[1] = f"--workdir={sys.argv[1]}"
    app.define_help_flags()
    argv = ["--help" if word == "-h" else word for word in sys.argv]
    try:
        rest = command_line.parse(argv, is_complete=is_complete, has_rollouts=has_rollouts)
        cli.fail_for(f"argument {word!r} is not a flag; write --config.FIELD=VALUE" for word in rest[1:])
    except ValueError as error:
        _fail(str(error), 2)


def before_leaving(clean_up: Callable[[], object]) -> None:
    """Registers `clean_up`, which is called before Ctrl-C or SIGTERM ends the process; a second call of it must do nothing."""
    _before_leaving.append(clean_up)


def run(main: Callable[[], None]) -> None:
    """Calls `main` after `parse`, with a cache of compiled programs, and reports its errors."""
    from sharding.mesh import programs  # imports JAX

    quiet = (("httpx", "WARNING"), ("jax._src.distributed", "WARNING"), ("jax._src.xla_bridge", "WARNING"))
    for name, level in (*quiet, ("tuf", "WARNING")):
        logging.getLogger(name).setLevel(level)  # otherwise a line per request, absent backend, and missing signature

    def guarded(argv):
        if flags.FLAGS.exit_with_parent:
            cli.stop_at_eof(lambda: os.kill(os.getpid(), signal.SIGINT))
        if is_main := threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) is _leave:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, _terminate)  # also where a run cannot save yet
        programs.enable_cache(flags.FLAGS.config.topology.compile_cache)
        with _signals() if is_main else contextlib.nullcontext():
            main()

    try:
        app.run(guarded, flags_parser=lambda argv: argv[:1])
    except (KeyboardInterrupt, ValueError, OSError, RuntimeError) as error:
        message, code, priority = explain(error)
        if priority == failure.BUG:
            raise
        if os.environ.get("INTELLAX_TRACEBACK"):
            traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            _end(message, code)
        _fail(message, code)


def explain(error: BaseException) -> tuple[str, int, int]:
    """Returns (message, exit code, priority) for an error that ends the command.

    When several hosts fail, the error of the lowest priority number (sharding/system/multihost/failure.py) is reported as the cause.
    """
    if isinstance(error, failure.Terminated):
        return str(error), 128 + error.number, failure.INTERRUPTED
    if isinstance(error, KeyboardInterrupt):
        return failure.INTERRUPTION, 130, failure.INTERRUPTED
    first = f"{type(error).__name__}: {error}".splitlines()[0]  # XLA appends a table of allocations
    if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and "RESOURCE_EXHAUSTED" in first:
        return f"{first}; {LESS_MEMORY}", 1, failure.MISTAKE
    outside = isinstance(error, OSError) and error.errno in OUTSIDE
    if isinstance(error, (ValueError, OSError)) and (outside or _raised_by_us(error)):
        return str(error), 1, failure.MISTAKE
    return first, 1, failure.BUG


def _raised_by_us(error: BaseException) -> bool:
    file = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    # A function in a config file, wherever it is, is the user's: only its traceback shows where it failed.
    return any(ROOT / package in file.parents for package in ("bench", "inference", "models", "rl", "sharding"))


def _leave(number: int, frame: object = None) -> NoReturn:
    _end(failure.INTERRUPTION if number == signal.SIGINT else str(failure.Terminated()), 128 + number)


def _terminate(number: int, frame: object) -> NoReturn:
    raise failure.Terminated()


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Makes Ctrl-C and SIGTERM end the block, and the second of them the process immediately: the first waits for a computation in the main thread.

    The error of a child process that got the signal, too, is not the cause. A command that handles signals by itself is left alone.
    """
    taken: list[int] = []
    repeated: list[int] = []

    def note_wait() -> None:
        cli.note("interrupted; it ends after the computation in progress, and Ctrl-C again ends it immediately")

    def take(number: int) -> None:
        if signal.getsignal(number) not in (signal.default_int_handler, _terminate):
            return
        if number in repeated:
            return repeated.remove(number)
        taken.append(number)
        if len(taken) > 1:
            _leave(number)
        if number == signal.SIGINT:
            _later(PATIENCE_S, note_wait)

    def raise_again(ignored: Any) -> None:
        """Takes an error that Python ignores, of a finalizer or a callback of the garbage collector: it may be that of a signal."""
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            return before(ignored)
        number = signal.SIGTERM if isinstance(ignored.exc_value, failure.Terminated) else signal.SIGINT
        repeated.append(number)
        _later(REPEAT_S, lambda: os.kill(os.getpid(), number))

    with failure.signals_in_thread(take):
        before, sys.unraisablehook = sys.unraisablehook, raise_again
        try:
            yield
        except (ValueError, OSError, RuntimeError) as error:
            interrupt = _interrupt_before(error)  # which the thread may not have taken yet
            if taken and not interrupt:
                interrupt = failure.Terminated() if taken[0] == signal.SIGTERM else KeyboardInterrupt()
            if interrupt:
                raise interrupt from None
            raise
        finally:
            sys.unraisablehook = before


def _interrupt_before(error: BaseException) -> BaseException | None:
    """Returns the error of a signal during whose handling `error` was raised; None if there is none, or it names a checkpoint."""
    before = error.__context__
    while before and not isinstance(before, KeyboardInterrupt):
        before = before.__context__
    return before if before and not before.args else None


def _later(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()


def _end(message: str, code: int) -> NoReturn:
    """Ends the process immediately: its usual end waits for threads that compile, which takes minutes."""

    def show() -> None:
        if os.isatty(1):
            os.write(1, SHOW_CURSOR)  # a progress display hides it
        print(f"error: {message}", file=sys.stderr, flush=True)

    failure.end_process(code, [*_before_leaving, sys.stdout.flush, show])


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)
