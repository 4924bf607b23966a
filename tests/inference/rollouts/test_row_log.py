"""The log of groups: records survive a kill at any byte, and rows come back as they were."""

import concurrent.futures
import os

import pytest

from inference.rollouts import parquet, row_log
from tests.support import cases
from tests.support.rollouts import assert_equal, make


def rows(*numbers):
    rollouts = [make(number, sample=number) for number in numbers]
    return parquet.decode(parquet.to_bytes(rollouts))


def read(log, step):
    return [(head, [r.sample for r in found.rollouts]) for head, found in log.read(step)]


@pytest.mark.parametrize("apart", cases.slow_but([97, 397], 397))
def test_records_survive_a_kill_at_any_byte(tmp_path, apart):
    log = row_log.RowLog(tmp_path)
    ended = [log.append(3, {"digest": str(n)}, rows(n, n + 1).take([1, 0])) for n in range(3)]
    [future.result(10) for future in ended]
    log.close()
    whole, expected = (tmp_path / "step_3.log").read_bytes(), read(log, 3)
    assert expected == [({"digest": str(n)}, [n + 1, n]) for n in range(3)]
    (_, first), *_ = row_log.RowLog(tmp_path).read(3)
    assert_equal(first.rollouts[0], make(1, sample=1))
    for size in {*range(0, len(whole), apart), len(whole) - 1}:
        (tmp_path / "step_3.log").write_bytes(whole[:size] + b"\xff" * 5)
        log = row_log.RowLog(tmp_path)
        before = read(log, 3)
        assert before == expected[: len(before)] and len(before) < len(expected)
        log.append(3, {"digest": "new"}, rows(7)).result(10)
        log.close()
        assert read(log, 3) == [*before, ({"digest": "new"}, [7])]
    assert log.steps() == [3]


def test_a_record_waits_for_its_event_and_fails_with_it(tmp_path):
    failures, event = [], concurrent.futures.Future()
    log = row_log.RowLog(tmp_path, failures.append)
    written = log.append(1, {}, rows(1), after=event)
    later = log.append(1, {}, rows(2))
    assert not concurrent.futures.wait([written, later], 0.2).done and not os.path.exists(tmp_path / "step_1.log")
    event.set_exception(OSError("no space"))
    for future in (written, later):
        with pytest.raises(OSError, match="no space"):
            future.result(10)
    assert [str(error) for error in failures] == ["no space"] and log.steps() == []
    log.close()


def test_a_removed_step_begins_again(tmp_path):
    log = row_log.RowLog(tmp_path)
    for n in (1, 2):
        log.append(5, {"digest": str(n)}, rows(n)).result(10)
        assert len(read(log, 5)) == 1
        log.remove(5)
        assert log.steps() == []
    log.close()
