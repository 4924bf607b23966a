"""Files with a secret: created once, for their owner alone; bad ones are refused, kept, and not quoted."""

import concurrent.futures
import stat

import pytest

from sharding.system import secret_file

TOKEN = "only-the-operator-has-this"


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("", 0o600, "no secret"),
        ("\n \n", 0o600, "no secret"),
        ("two words-0123456789", 0o600, "no secret"),
        ("\xff" * 20, 0o600, "no secret"),
        ("short", 0o600, "has 5 characters, not 16 or more"),
        (TOKEN, 0o644, "any user may use its secret; run chmod 600"),
        (TOKEN, 0o602, "any user may use its secret; run chmod 600"),
    ],
)
def test_a_bad_token_file_is_refused_and_not_replaced(tmp_path, text, mode, words):
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ValueError, match=words) as error:
        secret_file.read_or_create(file)
    assert file.read_text() == text and (not text.strip() or text not in str(error.value))


def test_a_token_is_created_once_for_its_owner_alone(tmp_path):
    """Many callers at the same time get the same one."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(lambda _: secret_file.read_or_create(tmp_path / "token"), range(64)))
    assert len(tokens) == 1 and len(tokens.pop()) >= 32
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="cannot create the secret .*: No such file or directory; name a file"):
        secret_file.read_or_create(tmp_path / "nowhere" / "token")
