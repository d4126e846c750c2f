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


def test_shares():
    timings = Timings()
    assert timings.shares() == {}
    timings.seconds = {"gather": 1.0, "learn": 4.0, "publish": 3.0}
    assert timings.shares() == {"gather": 0.125, "learn": 0.5, "publish": 0.375}
    shares = format_shares(timings.shares())
    assert shares == "gather 12 %, learn 50 %, publish 38 %"
