"""Unix sockets: one listener each, and no file of another kind is touched."""

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
