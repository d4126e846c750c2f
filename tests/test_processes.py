"""What procs/processes.py starts; the tests of faults use the rest of it."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from torchbeast.base import hardware
from torchbeast.procs import children
from torchbeast.tools import jobs


@pytest.mark.parametrize("quota", [2, 3, 64])
def test_a_quota_counts_for_a_sweep(monkeypatch, quota):
    monkeypatch.setattr(hardware, "num_cpus", lambda: quota)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: set(range(64)), raising=False
    )
    if quota < 64:
        assert jobs.split_cores(2, None) == [[], []]  # others use the same cores
    assert jobs.split_cores(1, 2) == [[0, 1]]


def ends(kind, pipe):
    children.begin_child()
    with children.sending_errors(pipe, "it failed"):
        # What an environment finds: the default, which may be set, and no "daemon".
        free = multiprocessing.get_start_method(allow_none=True) is None
        pipe.send("begun" if free else "a start method is set")
        process = multiprocessing.get_context("fork").Process(
            target=time.sleep, args=[99]
        )
        process.start()
        process.terminate()
        process.join()
        if kind == "exits":
            os._exit(255)
        sys.exit(4)


def hear(child, found):
    """Adds the child's messages to `found`, until it fails."""
    while children.wait([child], 60):
        found.append(child.receive())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("exits", r"a child \(pid \d+\) died with exit status 255, or the process"),
        ("raises", "it failed:\n"),
    ],
)
def test_a_child_sends_a_message_and_ends(kind, text):
    with contextlib.closing(
        children.Children(multiprocessing.get_context("spawn"))
    ) as group:
        child = group.start("a child", ends, kind)
        found = []
        with pytest.raises(children.ProcessError, match=text):
            hear(child, found)
        assert [x for x in found if x is not None] == ["begun"]
        assert group.alive == [child]
    assert not child.process.is_alive()


def test_a_dead_child_and_one_that_takes_no_steps():
    with contextlib.closing(
        children.Children(multiprocessing.get_context("spawn"))
    ) as group:
        child = group.start("a child", ends, "exits")
        child.process.join()
        child.send("what nobody reads")
        assert child.receive() == "begun"
        with pytest.raises(children.ProcessError, match="died with exit status 255"):
            child.receive()
        watch, child.steps = children.StepWatch(0.0), 3
        watch.check([child])
        time.sleep(0.01)
        watch.check([])
        with pytest.raises(children.ProcessError, match=r"\) made no step for 0 s\."):
            watch.check([child])
        child.steps = 4
        watch.check([child])
        watch.restart(child)
        watch.check([child])


@pytest.mark.parametrize(
    "before",
    [
        "logging.warning('before')",  # whatever the root's level is
        "start.guarded(lambda: start.print_warnings_only() or 0)",  # --suppress_logs
    ],
)
def test_logging_that_was_configured_before(before):
    """By a notebook, or by another call of main() there: all lines are logged."""
    code = (
        f"import logging; from torchbeast.runs import start; {before}\n"
        "log = logging.getLogger('torchbeast.x')\n"
        "start.guarded(lambda: log.info('after') or 0)"
    )
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert "after" in result.stderr
