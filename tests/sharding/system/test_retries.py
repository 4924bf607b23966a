from sharding.system import retries


def test_pauses_grow_up_to_the_limit_and_begin_again_after_a_success():
    backoff = retries.Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert [backoff.next_s() for _ in range(2)] == [1.0, 2.0]


def test_the_growth_may_be_another_one_and_the_limit_holds_for_the_first_pause():
    backoff = retries.Backoff(0.5, 1.0, growth=1.5)
    assert [backoff.next_s() for _ in range(4)] == [0.5, 0.75, 1.0, 1.0]
    assert retries.Backoff(9.0, 2.0).next_s() == 2.0
