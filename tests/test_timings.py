import time

from torchbeast.core.timings import Timings, format_shares


def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_sections_get_the_time_spent_in_them():
    timings = Timings()
    started = time.perf_counter()
    for _ in range(3):
        busy(0.004)  # Between time() and reset(): belongs to no section.
        timings.reset()
        busy(0.002)
        timings.time("gather")
        busy(0.006)
        timings.time("learn")
    elapsed = time.perf_counter() - started
    assert list(timings.seconds) == ["gather", "learn"]
    assert timings.seconds["gather"] >= 3 * 0.002
    assert timings.seconds["learn"] >= 3 * 0.006
    assert sum(timings.seconds.values()) <= elapsed - 3 * 0.004


def test_shares():
    timings = Timings()
    assert timings.shares() == {}
    timings.seconds = {"gather": 1.0, "learn": 4.0, "publish": 3.0}
    assert timings.shares() == {"gather": 0.125, "learn": 0.5, "publish": 0.375}
    shares = format_shares(timings.shares())
    assert shares == "gather 12 %, learn 50 %, publish 38 %"
