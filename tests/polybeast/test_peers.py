"""Peers that send what nobody can use, and a learner that goes on training.

A learner in a process of its own, and peers that speak torchbeast.proto with grpcio.
Every one of them costs a stream at most: it is told why, and the learner says who.
"""

import functools
import itertools

import pytest
from peers import (
    E,
    Peer,
    bad_rows,
    encode_row,
    good_messages,
    make_hello,
    make_row,
    playing,
    unusable_hellos,
)
from runs import read_logs
from watched_servers import T

grpc = pytest.importorskip("grpc", reason="needs grpcio and grpcio-tools")
pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")


def assert_refused(wire, address, *, begun):
    """Every unusable hello is refused with its reason. Returns how many there were.

    begun: environments play already; of what only the learner can't use, the refusal
        says then that it differs.
    """
    hellos = list(unusable_hellos(wire))
    for name, hello, words in hellos:
        with Peer(address) as peer:
            peer.send(wire.EnvMessage(hello=hello).SerializeToString())
            peer.send(encode_row(wire, make_row(0)))
            code, text = peer.status()
        assert code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION"), (name, code, text)
        assert words in text or (begun and "differ" in text), (name, text)
    return len(hellos)


def test_joined_peers_that_nobody_can_use(learn, wire, tmp_path):
    """None is the measure of others, none ends the run, and all hear the reason."""
    address = f"unix:{tmp_path}/learner"
    run = learn(listen=address, num_actors=2)
    run.wait_for((tmp_path / "learner").exists, "the learner listens")
    refused, failures = assert_refused(wire, address, begun=False), 0
    assert refused > 15
    with playing(address, wire):
        run.wait_for_updates(3)
        refused += assert_refused(wire, address, begun=True)
        first = [
            wire.EnvMessage(hello=make_hello(wire)).SerializeToString(),
            *(encode_row(wire, make_row(step)) for step in range(2)),
        ]
        for name, message, words in bad_rows(wire):
            with Peer(address) as peer:
                peer.play([*first, message])
                code, text = peer.status()
            assert code == "INVALID_ARGUMENT", (name, code, text)
            assert words in text, (name, text)
            refused += 1
            failures += 1
        # More than --max_env_failures, but of one machine, where another plays on.
        assert failures > 10
        with Peer(address) as peer:
            error = wire.EnvError(message="Traceback: broken")
            peer.play([*first, wire.EnvMessage(error=error).SerializeToString()])
            assert peer.status()[0] == "OK"
        run.wait_for_updates(3)
        run.wait_for(
            lambda: int(read_logs(tmp_path, "run")[-1]["env_failures"]) == failures + 1,
            "all failures are counted",
        )
        last = read_logs(tmp_path, "run")[-1]
        assert int(last["refused"]) == refused
        assert last["streams"] == "1"
        assert int(last["dropped_steps"]) >= 2 * E
        run.end()
    run.assert_no_error()
    assert "A stream is refused: " in run.console


def stray_messages(wire, rows):
    """Environments that are none of this run: one action less."""
    hello = make_hello(wire)
    hello.action_space.discrete.n = 4
    yield wire.EnvMessage(hello=hello).SerializeToString()
    for step in range(rows):
        yield encode_row(wire, make_row(step))


@pytest.mark.parametrize(
    ("flags", "size", "named"),
    [
        ({"num_actors": 64, "unroll_length": 20}, 2**20 - 9, "--num_actors"),
        (
            {"num_actors": 4, "replay_ratio": 1, "replay_size": 10**6},
            2**16,
            "--replay_size",
        ),
    ],
    ids=["rollouts", "replay"],
)
def test_a_stray_whose_rollouts_are_too_large(
    learn, wire, tmp_path, flags, size, named
):
    """One stream fits, but not all, or no replay; it joins first."""
    address = f"unix:{tmp_path}/learner"
    run = learn(listen=address, **flags)
    run.wait_for((tmp_path / "learner").exists, "the learner listens")
    hello = make_hello(wire)
    box = wire.Space.Box(dtype=wire.FLOAT64, shape=[size])
    hello.observation_space.CopyFrom(wire.Space(box=box))
    del hello.extra_fields[:]
    with Peer(address) as stray:
        stray.play([wire.EnvMessage(hello=hello).SerializeToString()])
        code, text = stray.status()
        assert code == "FAILED_PRECONDITION", text
        assert named in text
    with playing(address, wire):
        run.wait_for_updates(3)
        run.end()
    run.assert_no_error()


def test_strays_do_not_determine_the_spaces(learn, wire, tmp_path):
    """Neither those that leave, nor those that are silent, nor on a resumed run."""
    address = f"unix:{tmp_path}/learner"
    flags = {"listen": address, "num_actors": 4}
    run = learn(**flags)
    run.wait_for((tmp_path / "learner").exists, "the learner listens")
    silent = functools.partial(stray_messages, rows=0)
    with Peer(address) as leaver, playing(address, wire, silent):
        leaver.play(stray_messages(wire, rows=T))  # T - 1 steps, so no unroll
        with playing(address, wire):
            leaver.call.cancel()
            run.wait_for_updates(3)
            with Peer(address) as late:
                late.play(stray_messages(wire, rows=1))
                code, text = late.status()
            assert code == "FAILED_PRECONDITION", text
            assert "differ" in text
            run.end()
    run.assert_no_error()

    resumed = learn(**flags)
    resumed.wait_for((tmp_path / "learner").exists, "the learner listens")
    with Peer(address) as stray:
        stray.play(stray_messages(wire, rows=1))
        code, text = stray.status()
        assert code == "FAILED_PRECONDITION", text
        assert "don't fit the model" in text
    with playing(address, wire):
        resumed.wait_for_updates(3)
        resumed.end()
    assert "Resuming at step" in resumed.console
    resumed.assert_no_error()


def test_a_step_that_comes_before_its_action(learn, wire, tmp_path):
    """It is not taken as the action's result, however the peer counts."""
    address = f"unix:{tmp_path}/learner"
    run = learn(listen=address, num_actors=2)
    run.wait_for((tmp_path / "learner").exists, "the learner listens")
    with playing(address, wire):
        run.wait_for_updates(1)
        with Peer(address) as peer:  # after some good ones
            rows = [*itertools.islice(good_messages(wire), 4)]
            peer.play(rows)
            peer.send(rows[-1])  # answers none, as it is
            code, text = peer.status()
            assert code == "INVALID_ARGUMENT", text
            assert "the step answers action 0, and the last action is" in text
        run.wait_for_updates(1)
    assert "[ERROR " not in run.console
