import threading
import time

import pytest

from torchbeast.core.prof import Timings


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
    assert timings.counts == {"gather": 3, "learn": 3}
    assert timings.seconds["gather"] >= 3 * 0.002
    assert timings.seconds["learn"] >= 3 * 0.006
    assert sum(timings.seconds.values()) <= elapsed - 3 * 0.004


def test_means_and_shares():
    timings = Timings()
    timings.seconds = {"gather": 1.0, "learn": 4.0, "publish": 3.0}
    timings.counts = {"gather": 5, "learn": 5, "publish": 2}
    assert timings.means() == {"gather": 0.2, "learn": 0.8, "publish": 1.5}
    assert timings.shares() == {"gather": 0.125, "learn": 0.5, "publish": 0.375}
    assert timings.summary("learner:") == (
        "learner: learn 800.00 ms (50 %), publish 1500.00 ms (38 %), "
        "gather 200.00 ms (12 %)"
    )


def test_nothing_timed_yet():
    timings = Timings()
    assert timings.means() == timings.shares() == {}
    assert timings.summary("actor:") == "actor: nothing timed"


def test_waiting_is_seen():
    timings = Timings()
    event = threading.Event()
    timer = threading.Timer(0.05, event.set)
    timings.reset()
    timer.start()
    assert event.wait(timeout=10)
    timings.time("wait")
    timings.time("work")
    timer.join()
    assert timings.means()["wait"] > 0.04
    assert sum(timings.shares().values()) == pytest.approx(1)
