"""One run that tests of several files share."""

import fcntl

import pytest

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
