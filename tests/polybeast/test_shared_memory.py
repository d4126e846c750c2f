"""Streams on one machine, whose messages go through shared memory: how they end."""

import itertools
import os
import signal
import threading
import time
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest
import servers
import torch
from servers import Run, ServerProcess
from watched_runs import wait_until

pytestmark = pytest.mark.timeout(120)


def zeros(inputs):
    (_, _, done, *_), _ = inputs
    return (torch.zeros(done.shape, dtype=torch.int64),), ()


def num_mappings(pid="self"):
    """Of shared memory: a process has one of each lane, and of the doorbell."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:torchbeast")


def take(run, count):
    for _ in range(count):
        next(iter(run.queue))


def test_a_stream_at_a_unix_socket_uses_it(address):
    own = num_mappings()
    with ServerProcess("Coded", address) as server:
        with Run([address, address], zeros) as run:
            wait_until(lambda: run.pool.stats()["num_connected"] == 2, "both")
            take(run, 5)
            # Two lanes, and the learner's doorbell twice.
            assert num_mappings(server.process.pid) == 4
            assert num_mappings() >= own + 2
        wait_until(lambda: num_mappings(server.process.pid) == 0, "nothing is left")
        # Only the doorbell stays, for the next pool.
        assert num_mappings() <= own + 1


def test_a_stream_over_tcp_does_not(address):
    own = num_mappings()
    with (
        ServerProcess("Coded", "127.0.0.1:0") as server,
        Run([server.address], zeros) as run,
    ):
        take(run, 5)
        assert num_mappings(server.process.pid) == 0
        assert num_mappings() == own


def test_both_carry_the_same_rollouts(tmp_path):
    """Bit for bit, with frames, truncations, and rows of several environments."""
    taken = []
    for address in (f"unix:{tmp_path}/socket", "127.0.0.1:0"):
        with ServerProcess("CodedVector", address) as server:
            initial = {"counter": torch.zeros(1, 1, 2)}
            with Run([server.address], act_with_state, initial, batch=3) as run:
                taken.append(list(itertools.islice(run.queue, 40)))
                assert len(taken[-1]) == 40, run.error()
    for lane, stream in zip(*taken, strict=True):
        assert_equal(lane, stream)


def act_with_state(inputs):
    (observation, _, done, *_), state = inputs
    action = (observation["code"].sum(-1) % servers.NUM_ACTIONS).long()
    outputs = {"action": action, "baseline": observation["code"].sum(-1).float()}
    outputs["truncation_value"] = torch.zeros_like(outputs["baseline"])
    return outputs, {"counter": state["counter"] + done[..., None]}


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        a, b = list(a.values()), list(b.values())
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert torch.equal(a, b)


def test_a_killed_server_is_noticed_at_once_and_nothing_is_left(address):
    with ServerProcess("Coded", address) as server:
        own = num_mappings()
        with Run([address], zeros, step_timeout_s=60) as run:
            take(run, 3)
            before = num_mappings()
            # A stream that waits for room in the queue notices nothing.
            threading.Thread(target=lambda: [None for _ in run.queue]).start()
            server.kill()
            wait_until(lambda: run.pool.stats()["num_connected"] == 0, "noticed", 15)
            wait_until(lambda: num_mappings() < before, "it is unmapped")
            with ServerProcess("Coded", address):
                take(run, 20)
                assert run.pool.stats()["num_reconnects"] == 1
        assert num_mappings() <= own + 1


def test_a_stopped_server_costs_its_stream_only(tmp_path):
    addresses = [f"unix:{tmp_path}/{i}" for i in range(2)]
    with (
        ServerProcess("Coded", addresses[0]) as stopped,
        ServerProcess("Coded", addresses[1]),
        Run(addresses, zeros, step_timeout_s=1) as run,
    ):

        def has(count):
            take(run, 1)
            return run.pool.stats()["num_connected"] == count

        wait_until(lambda: has(2), "both")
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: has(1), "the other goes on")
            take(run, 10)
            assert "step timeout" in run.pool.stats()["last_error"]
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)
        wait_until(lambda: has(2), "it comes back")


def test_a_learner_that_is_slow_gets_all_rollouts(address):
    """The queue is full most of the time."""
    with ServerProcess("Counting", address), Run([address] * 3, zeros) as run:
        seen = []
        for _ in range(30):
            time.sleep(0.02)
            (env_outputs, _), _ = next(iter(run.queue))
            seen.append(env_outputs[0][:, 0, 0, 0].tolist())
    ends = []  # the last frame of each stream so far
    for frames in seen:  # steps of one environment, none lost, none twice
        assert np.all(np.diff(frames) % 256 == 1), frames
        if frames[0] in ends:
            ends.remove(frames[0])
        else:
            assert frames[0] == seen[0][0]
        ends.append(frames[-1])
        assert len(ends) <= 3


def threads_with(number, address, most=10**9):
    """How many threads this process has while it plays so many streams.

    It waits until there are `most` at most.
    """

    def count():
        return len(os.listdir("/proc/self/task"))

    with ServerProcess("Counting", address), Run([address] * number, zeros) as run:
        take(run, 3 * number)
        wait_until(lambda: run.pool.stats()["num_connected"] == number, "all")
        time.sleep(0.3)  # those that have dialled are gone
        wait_until(lambda: count() <= most, f"{most} threads")
        return count()


def test_streams_take_no_thread_each(address):
    few = threads_with(4, address)
    threads_with(36, address, most=few + 2)


# --- Peers that offer it and do not mean it -------------------------------------------


def handler(wire, stream):
    """Of a service EnvServer whose method is `stream(requests, context)`."""
    grpc = pytest.importorskip("grpc")
    method = grpc.stream_stream_rpc_method_handler(
        stream,
        request_deserializer=wire.AgentMessage.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )
    return grpc.method_handlers_generic_handler(
        "torchbeast.wire.EnvServer", {"Stream": method}
    )


@pytest.mark.parametrize("process", [0, 1, "own"])
def test_memory_that_can_not_be_opened_is_not_used(wire, address, process):
    """The stream carries the messages."""
    grpc = pytest.importorskip("grpc")
    chosen = []

    def stream(requests, context):
        offered = next(requests).hello
        assert offered.doorbell.process == os.getpid()
        hello = wire.EnvHello(version=3, num_envs=1)
        hello.observation_space.box.dtype = wire.UINT8
        hello.action_space.discrete.n = 2
        hello.shared_memory.process = os.getpid() if process == "own" else process
        hello.shared_memory.file = 0
        hello.shared_memory.nonce = bytes(16)
        yield wire.EnvMessage(hello=hello)
        choice = next(requests)
        chosen.append((choice.WhichOneof("kind"), choice.shared_memory))
        number = 0
        for count in range(10**6):
            row = bytes([count % 256]) + bytes(4) + bytes([count == 0])
            row += count.to_bytes(8, "little") + bytes(4)
            step = wire.EnvStep(arrays=row, action_number=number)
            yield wire.EnvMessage(step=step)
            number = next(requests).action.number

    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler(wire, stream),))
    server.add_insecure_port(address)
    server.start()
    try:
        with Run([address], zeros) as run:
            take(run, 3)
    finally:
        server.stop(None).wait(10)
    assert chosen == [("shared_memory", False)]


@pytest.mark.parametrize("answer", ["no", "an action", "false doorbell"])
def test_a_learner_that_does_not_take_it(wire, address, answer):
    grpc = pytest.importorskip("grpc")
    with ServerProcess("Coded", address) as server:
        with Run([address], zeros) as run:  # a doorbell that exists
            take(run, 1)
            bell = find_doorbell(server.process.pid)
        hello = wire.AgentHello(version=3)
        hello.doorbell.process = 1 if answer == "false doorbell" else os.getpid()
        hello.doorbell.file, hello.doorbell.nonce = bell
        sent = [wire.AgentMessage(hello=hello)]
        action = wire.AgentAction(arrays=bytes(8), number=7)
        if answer == "no":
            sent.append(wire.AgentMessage(shared_memory=False))
        if answer != "an action":
            sent.append(wire.AgentMessage(action=action))
        else:
            sent += [wire.AgentMessage(action=action)] * 2
        with grpc.insecure_channel(address) as channel:
            call = channel.stream_stream(
                "/torchbeast.wire.EnvServer/Stream",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=wire.EnvMessage.FromString,
            )(iter(sent), timeout=30)
            first = next(call).hello
            assert first.HasField("shared_memory") == (answer != "false doorbell")
            if answer == "an action":
                with pytest.raises(grpc.RpcError) as caught:
                    list(call)
                assert "no answer to the shared memory" in caught.value.details()
                return
            assert next(call).step.action_number == 0
            assert next(call).step.action_number == 7
    assert server.process.returncode == 0


def find_doorbell(pid):
    """(descriptor, nonce) of this process's doorbell."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if "memfd:torchbeast" in os.readlink(f"/proc/self/fd/{name}"):
                return int(name), Path(f"/proc/self/fd/{name}").read_bytes()[:16]
        except OSError:
            continue
    raise AssertionError("no doorbell")
