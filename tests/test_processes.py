"""What procs/processes.py starts; the tests of faults use the rest of it."""

import contextlib
import multiprocessing
import os
import sys
import time

import pytest

from torchbeast.procs import children


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
