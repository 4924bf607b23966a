import pytest

from sharding.weights.bucket import mirror, storage
from tests.support import s3_server


@pytest.fixture(scope="session")
def s3():
    with s3_server.running() as url:
        yield url


@pytest.fixture(autouse=True)
def fast(monkeypatch, tmp_path):
    monkeypatch.setattr(mirror, "EVERY_S", 0.02)
    monkeypatch.setattr(mirror, "BEAT_S", 0.1)
    monkeypatch.setattr(mirror, "LEASE_S", 0.6)
    monkeypatch.setattr(mirror, "FAILED_CLOSE_S", 0.5)
    monkeypatch.setattr(storage, "NOTICE_S", 0.3)
    monkeypatch.setenv("INTELLAX_BUCKET_CACHE", str(tmp_path / "machine"))
