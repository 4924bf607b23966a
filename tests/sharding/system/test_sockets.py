"""Unix sockets: one listener each, and no file of another kind is touched."""

import os
import stat
import subprocess
import sys
import tempfile

import pytest

from sharding.system import sockets


def test_a_killed_servers_socket_is_replaced_and_a_file_is_not(tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        sockets.listen_unix(f"{folder}/s").close()  # leaves its file
        sockets.listen_unix(f"{folder}/s").close()
        (tmp_path / "file").write_text("precious")
        with pytest.raises(ValueError, match="cannot listen on unix socket"):
            sockets.listen_unix(tmp_path / "file")
        assert (tmp_path / "file").read_text() == "precious"


def test_the_folder_of_a_killed_process_is_removed(tmp_path, monkeypatch):
    """Not that of a live process, one that may be locked in a moment, or one with other files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    precious = tmp_path / "intellax-socket-precious"
    (precious / "run").mkdir(parents=True)
    code = "from sharding.system import sockets; import os, sys; listens = sockets.private_path()\n"
    code += "sockets.listen_unix(path := listens.__enter__()); print(path, flush=True); os.kill(os.getpid(), 9)"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    killed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    ).stdout.strip()
    with sockets.private_path() as alive, sockets.listen_unix(alive):
        assert stat.S_IMODE(os.stat(os.path.dirname(alive)).st_mode) == 0o700 and os.path.exists(killed)
        monkeypatch.setattr(sockets, "GRACE_S", -1.0)
        with sockets.private_path():
            assert os.path.exists(alive) and not os.path.exists(os.path.dirname(killed))
    assert [*tmp_path.iterdir()] == [precious] and (precious / "run").is_dir()
