import time

from torchbeast.core.timings import Timings, format_shares


def test_sections_get_the_time_spent_in_them(monkeypatch):
    clock = iter([0, 5, 6, 8, 20, 21, 24])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timings = Timings()
    for _ in range(2):
        timings.reset()  # what is before it belongs to no section
        timings.time("gather")
        timings.time("learn")
    assert list(timings.seconds.items()) == [("gather", 2), ("learn", 5)]
    assert timings.shares() == {"gather": 2 / 7, "learn": 5 / 7}
    assert format_shares(timings.shares()) == "gather 29 %, learn 71 %"
