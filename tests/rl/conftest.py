"""One run that tests of several files share, and processes that score for all tests of a file."""

import fcntl

import pytest

from rl.envs.scoring import scorer as scorer_lib
from tests.support import tiny_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The working directory and the printed text of an uninterrupted synchronous run, compiled as users do. Tests only read it.

    All processes of pytest share one: the first makes it, and the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "trained"
    folder.mkdir(exist_ok=True)
    workdir, printed = folder / "w", folder / "printed"
    with open(folder / "lock", "w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():
            for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
                patch.delenv(name, raising=False)
            result = tiny_run.run(workdir)
            assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
            printed.write_text(result.stdout)
    return workdir, printed.read_text()


@pytest.fixture(scope="module")
def shared_scorers():
    """Lets all scorers of one environment and its options be one, which takes a second to start: for tests that do not end its process."""
    made = {}

    class Shared(scorer_lib.Scorer):
        def __new__(cls, *args, **options):
            key = repr((args, {name: value for name, value in options.items() if name != "on_error"}))
            return made.setdefault(key, super().__new__(cls))

        def __init__(self, *args, **options):
            if not hasattr(self, "limit_s"):
                super().__init__(*args, **options)

        def close(self):
            """Leaves the process to other tests."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer_lib, "Scorer", Shared)
        yield
    for one in made.values():
        super(Shared, one).close()
