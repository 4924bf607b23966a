"""The keys of a working directory: generated whole, and refused when cut off."""

import pytest

from configs import quickstart
from rl.experiment import experiment, rules
from rl.experiment import workdir as run_directory


@pytest.mark.parametrize("content", [b"", bytes(31), bytes(33)])
def test_a_cut_off_secret_is_refused(tmp_path, content):
    """An empty one was taken, and /run publishes the seed: everyone knew which groups are replayed."""
    assert run_directory.secret(tmp_path, 17) == run_directory.secret(tmp_path, 17)
    assert run_directory.secret(tmp_path, 17).endswith(b"17") and len(run_directory.secret(tmp_path, 17)) == 34
    (tmp_path / "secret.key").write_bytes(content)
    with pytest.raises(ValueError, match=f"secret.key has {len(content)} bytes"):
        run_directory.secret(tmp_path, 17)
    (tmp_path / "weights.key").write_bytes(content)
    with pytest.raises(ValueError, match="the run's signing key .*weights.key is not an unencrypted PEM private key"):
        run_directory.signing_key(tmp_path)


def test_a_run_that_has_begun_gets_no_new_key(tmp_path, capsys):
    """A new one was written, after which even the error of the next start named the wrong key."""
    run_directory.signing_key(tmp_path)
    run_directory.open_ledger(tmp_path, None).__exit__()
    for name in ("weights.key", "ledger.key"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        with pytest.raises(ValueError, match=f"{name} does not exist, but .* put the key back from a backup"):
            run_directory.open_ledger(tmp_path, None)
        assert not (tmp_path / name).exists()
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=f"the .* key .*{name} cannot be read: Is a directory; name a file"):
            run_directory.open_ledger(tmp_path, None)
        (tmp_path / name).rmdir()
        (tmp_path / name).write_bytes(content)
    assert not capsys.readouterr().err
    (tmp_path / "secret.key").unlink()
    for notice in ("secret.key was lost, and is made again", ""):
        run_directory.open_ledger(tmp_path, None).__exit__()
        assert notice in (found := capsys.readouterr().err) and bool(notice) == bool(found)


def test_a_kill_while_a_key_is_written_leaves_a_directory_that_is_taken(tmp_path):
    exp = experiment.resolve(quickstart.get_config())
    (tmp_path / ".hosts.0123456789abcdef.tmp").write_bytes(b"half")
    with run_directory.open_workdir(tmp_path, exp):
        assert not list(tmp_path.glob("*.tmp")) and (tmp_path / "config.json").exists()
    other = quickstart.get_config()
    other.seed += 1
    (tmp_path / "checkpoints" / "0").mkdir(parents=True)  # metrics.jsonl was lost
    with pytest.raises(ValueError, match="belongs to another config: seed was .* its last start, "):
        run_directory.open_workdir(tmp_path, experiment.resolve(other)).__enter__()
    (tmp_path / "metrics.jsonl").touch()
    for name in ("", "A/b"):  # before the repository is downloaded
        other.init_from = name
        found = [*rules.mistakes_outside(other, str(tmp_path))]
        assert [*map(bool, found)] == [True] * bool(name)
        assert not name or "init_from was '', now 'A/b'; give the fields of its last start: " in found[0]


def test_a_run_keeps_to_the_commits_that_it_began_with(tmp_path):
    """A repository on the hub can change between a start and a resume."""
    run_directory.record_downloads(tmp_path, {})
    assert not list(tmp_path.iterdir())
    for ids in ({"A/b": "1"}, {"A/b": "1", "A/b@main": "1", "C/d": "9"}, {"A/b@1": "1"}):
        run_directory.record_downloads(tmp_path, ids)
    with pytest.raises(
        ValueError, match="A/b is at commit 2, and the run in .* began with 1; write A/b@1 in the config"
    ):
        run_directory.record_downloads(tmp_path, {"A/b@2": "2"})
    for ids, same in (("A/b A/b@1", True), ("A/b@1 A/b", True), ("A/b A/c@1", False), ("./a@1 ./a", False)):
        first, second = ({"tokenizer": id} for id in ids.split())
        assert (run_directory.differing(first, second, ["-"]) == []) == same
