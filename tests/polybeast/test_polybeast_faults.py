"""PolyBeast's servers and learner, started apart, and faults between them.

Real processes, each in a session of its own. Training goes on where it can, and ends
loudly where it can't; test_polybeast.py has the faults of both started together.
"""

import contextlib
import os
import pathlib
import random
import re
import resource
import signal
import socket

import pytest
import torch
from certificates import Certificates
from runs import skip
from test_attacks import JOIN, attack_with_streams
from watched_runs import END_SECONDS, wait_until
from watched_servers import (
    E,
    T,
    assert_says,
    assert_whole_updates,
    rows_of,
)

# --- Servers die ----------------------------------------------------------------------


def test_servers_killed_in_turn(serve, learn, pipes):
    servers = serve(pipes_basename=pipes, num_servers=2)
    servers.addresses(2)
    run = learn(pipes_basename=pipes, num_servers=2, num_actors=4)
    run.wait_for_updates(2)
    for kills in (1, 2):
        (victim, *_) = servers.children()  # the one that has lived longest
        os.kill(victim, signal.SIGKILL)
        run.wait_for(
            lambda kills=kills: int(rows_of(run)[-1]["reconnects"]) == 2 * kills,
            "both streams of the server came back",
        )
        run.wait_for_updates(5)
    run.process.send_signal(signal.SIGINT)
    run.wait_for_end(130)
    run.assert_no_error()
    rows = assert_whole_updates(run)
    assert int(rows[-1]["reconnects"]) == 4
    # Of each lost stream less than an unroll, and one that waits for the queue.
    assert int(rows[-1]["dropped_steps"]) <= 4 * E * T
    assert run.console.count("Reconnects 4, dropped steps ") == 1
    assert servers.console.count(" died by signal SIGKILL") == 2
    servers.process.send_signal(signal.SIGTERM)
    servers.wait_for_end(143)


def test_a_lost_stream_ends_a_run_with_sync(serve, learn, pipes):
    servers = serve(pipes_basename=pipes, num_servers=2)
    servers.addresses(2)
    sync = {"sync": True, "disable_checkpoint": True}
    run = learn(pipes_basename=pipes, num_servers=2, **sync)
    run.wait_for_updates(2)
    os.kill(servers.children()[0], signal.SIGKILL)
    run.wait_for_end(1)
    assert_says(run, "ServerError: a stream was lost", "--sync")
    servers.process.send_signal(signal.SIGTERM)
    servers.wait_for_end(143)


def test_a_joined_environment_that_breaks_a_rule_is_replaced(serve, learn, tmp_path):
    fault, address = tmp_path / "fault", f"unix:{tmp_path}/learner"
    env = {"env": "faulty:Environment"}
    run = learn(listen=address, num_actors=2, **env)
    servers = serve(
        join=address, num_servers=2, env_vars={"FAULT_FILE": str(fault)}, **env
    )
    run.wait_for_updates(3)
    fault.write_text("nan_reward")
    run.wait_for(lambda: "rewards [nan" in run.console, "the error")
    fault.unlink()
    run.wait_for(lambda: "starting it again" in servers.console, "a restart")
    run.wait_for_updates(5)
    run.wait_for(lambda: int(rows_of(run)[-1]["streams"]) == 2, "both are back")
    assert "rewards [nan" in servers.console
    servers.process.send_signal(signal.SIGTERM)
    servers.wait_for_end(143)
    run.process.send_signal(signal.SIGINT)
    run.wait_for_end(130)


def take_threads_away(pid, stack):
    """From here on the process can start no thread, as in a full container."""
    if os.geteuid() != 0:  # the limit does not bind root
        resource.prlimit(pid, resource.RLIMIT_NPROC, (1, 1))
        return
    for root in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
        group = pathlib.Path(root, f"torchbeast-{pid}")
        with contextlib.suppress(OSError):
            group.mkdir()
            stack.callback(group.rmdir)
            (group / "pids.max").write_text("1")
            (group / "cgroup.procs").write_text(str(pid))
            return
    skip("there is no cgroup to limit the threads of root")


def test_a_learner_that_can_start_no_threads_goes_on_and_saves(serve, learn, tmp_path):
    """Under attack, too. gRPC's errors do not fill the log."""
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    run = learn(
        listen="127.0.0.1:0", num_actors=2, token_file=token, checkpoint_interval=600
    )
    listens = re.compile(r"Listening at (\S+)")
    run.wait_for(lambda: listens.search(run.console), "an address")
    address = listens.search(run.console)[1]
    servers = serve(join=address, num_servers=2, token_file=token)
    run.wait_for_updates(3)
    with contextlib.ExitStack() as stack:
        take_threads_away(run.pid, stack)
        num_threads = len(os.listdir(f"/proc/{run.pid}/task"))
        assert attack_with_streams(run.pid, address, JOIN) <= num_threads
        run.wait_for_updates(3)
        assert int(rows_of(run)[-1]["streams"]) == 2
        assert int(rows_of(run)[-1]["reconnects"]) == 0
        run.process.send_signal(signal.SIGTERM)
        # gRPC answers the calls that wait, before it ends; a few threads do that.
        run.wait_for_end(143, 6 * END_SECONDS)
    run.assert_no_error()
    run.assert_files()
    assert run.console.count("gRPC") < 10, run.console
    servers.process.send_signal(signal.SIGTERM)
    servers.wait_for_end(143)


def test_an_environment_raises(serve, learn, pipes, tmp_path):
    fault = tmp_path / "fault"
    env = {"env": "faulty:Environment"}
    servers = serve(pipes_basename=pipes, env_vars={"FAULT_FILE": str(fault)}, **env)
    run = learn(pipes_basename=pipes, num_servers=1, max_env_failures=8, **env)
    run.wait_for_updates(3)
    # Once costs the stream, which comes back.
    fault.write_text("raise_error")
    run.wait_for(lambda: "An environment raised" in run.console, "the event")
    fault.unlink()
    run.wait_for(lambda: "A stream is back: " in run.console, "its return")
    run.wait_for_updates(3)
    assert "[ERROR " not in run.console
    fault.write_text("raise_error")
    run.wait_for_end(1, 2 * END_SECONDS)
    assert run.console.count("[ERROR ") == 1
    assert "more than 8 environments have raised within a minute" in run.console
    assert "ValueError: the ball left the table" in run.console
    assert "in raise_error" in run.console, "the environment's traceback"
    run.assert_files()
    # The fault is over: the next learner finds the servers as if nothing had been.
    fault.unlink()
    step = int(rows_of(run)[-1]["step"])
    run = learn(
        pipes_basename=pipes,
        num_servers=1,
        total_steps=step + 10 * 2 * E * T,
        **env,
    )
    run.wait_for_end(0)
    assert f"Resuming at step {step}." in run.console
    servers.process.send_signal(signal.SIGINT)
    servers.wait_for_end(130)


def test_servers_end_while_they_make_environments(serve, pipes, tmp_path):
    """Their programs end too, even if they hold Python's lock."""
    both = {}
    for name in ("interrupted", "killed"):
        fault = tmp_path / name
        both[name] = serve(
            pipes_basename=f"{pipes}-{name}",
            env="faulty:SlowToMake",
            num_servers=2,
            env_vars={"FAULT_FILE": str(fault)},
        )
    for name in both:
        making = f"{name}.*"
        wait_until(lambda x=making: len(list(tmp_path.glob(x))) == 2, "environments")
    both["killed"].process.kill()
    os.killpg(both["interrupted"].pid, signal.SIGINT)
    both["interrupted"].wait_for_end(130)
    assert "Traceback" not in both["interrupted"].console
    both["killed"].wait_for_end(-signal.SIGKILL)


def test_a_learner_does_not_wait_with_a_wrong_name(learn, pipes):
    """Nobody else is to be refused for it."""
    run = learn(listen=f"{pipes}.join", encoder="no_such_module:Encoder")
    run.wait_for_end(1)
    assert "--encoder no_such_module:Encoder: No module named" in run.console
    assert "refused" not in run.console


def test_sigint_while_servers_start(serve, pipes):
    """During imports, with one line each time."""
    servers = serve(pipes_basename=pipes)
    wait_until(servers.children, "the start of a server")
    os.killpg(servers.pid, signal.SIGINT)
    servers.wait_for_end(130)
    (line,) = servers.console.splitlines()
    assert "SIGINT: exits" in line

    servers = serve(pipes_basename=pipes)
    maps = pathlib.Path(f"/proc/{servers.pid}/maps")
    wait_until(lambda: "_multiarray_umath" in maps.read_text(), "the import of NumPy")
    os.killpg(servers.pid, signal.SIGINT)
    servers.wait_for_end(130)
    assert servers.console == ""


# --- The learner dies -----------------------------------------------------------------


def test_learner_killed_and_resumed(serve, learn, pipes):
    servers = serve(pipes_basename=pipes, num_servers=2)
    servers.addresses(2)
    children = servers.children()
    run = learn(pipes_basename=pipes, num_servers=2)
    run.wait_for_a_checkpoint()
    run.wait_for_updates(3)
    run.process.kill()
    run.process.wait()
    run.assert_nothing_left()
    step = torch.load(run.checkpoint, weights_only=True)["stats"]["step"]
    assert 0 < step <= int(rows_of(run)[-1]["step"])

    run = learn(
        pipes_basename=pipes,
        num_servers=2,
        total_steps=step + 20 * 2 * E * T,
    )
    run.wait_for_end(0)
    run.assert_no_error()
    assert f"Resuming at step {step}." in run.console
    rows = assert_whole_updates(run)
    assert int(rows[-1]["step"]) == step + 20 * 2 * E * T
    assert len(rows) == int(rows[-1]["step"]) // (2 * E * T), "no row twice or lost"
    assert servers.children() == children, "the servers have stayed"
    servers.process.send_signal(signal.SIGTERM)
    servers.wait_for_end(143)


# --- Who is who -----------------------------------------------------------------------


def assert_refused(learn, cases, patience=END_SECONDS):
    """Learners with the flags of each case end soon, with these words; all at once."""
    # In groups: each learner takes some 300 MiB.
    names = list(cases)
    for i in range(0, len(names), 4):
        group = names[i : i + 4]
        started = [learn(name, **cases[name][0]) for name in group]
        for name, run in zip(group, started, strict=True):
            run.wait_for_end(1, 4 * patience)  # nothing but four starts at once
            assert_says(run, *cases[name][1])
            assert not run.path.exists(), "nothing was written"


def test_tokens_and_certificates(serve, learn, tmp_path):
    certificates = Certificates(tmp_path)
    certificates.make("server", "IP:127.0.0.1")
    certificates.make("client", "DNS:learner")
    certificates.make("foreign-client", "DNS:learner", "foreign")
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    token.write_text("between-us\n")
    wrong.write_text("between-others\n")
    ours, foreign = certificates.ca("ours"), certificates.ca("foreign")
    bind = {"bind": "127.0.0.1:0", "token_file": token}
    servers = serve(**bind, **ours, **certificates.identity("server"))
    # It is not waited for: it refuses for good.
    here = {"server_addresses": servers.addresses()[0], "connect_timeout": 600}
    us = {**ours, **certificates.identity("client"), "token_file": token}

    run = learn("good", **us, **here)
    run.wait_for_updates(3)
    refused = ["RefusedError", "token is missing or wrong", servers.addresses()[0]]
    never = ["RefusedError", "no connection with", servers.addresses()[0]]
    assert_refused(
        learn,
        {
            "wrong-token": ({**us, **here, "token_file": wrong}, refused),
            "no-certificate": (
                {**here, **ours, "token_file": token},
                [*never, "it ends the connection"],
            ),
            "foreign-client": (
                {**us, **here, **certificates.identity("foreign-client")},
                [*never, "it ends the connection", "foreign-client.pem"],
            ),
            "foreign-ca": (
                {**us, **here, **foreign},
                [*never, "certificate of the other side is not valid"],
            ),
            "no-tls": (
                {**here, "token_file": token},
                [*never, "it speaks TLS"],
            ),
        },
    )
    run.wait_for_updates(3)  # the others are none of its business
    run.process.send_signal(signal.SIGINT)
    run.wait_for_end(130)
    run.assert_no_error()
    servers.process.send_signal(signal.SIGTERM)
    servers.wait_for_end(143)


# --- Strange peers --------------------------------------------------------------------


AGENT_HELLO_OF_VERSION_1 = b"\x0a\x02\x08\x01"
GARBAGE = random.Random(1).randbytes(10_000)


def test_servers_meet_strange_peers(serve, learn, pipes):
    """None of them disturbs the other streams."""
    grpc = pytest.importorskip("grpc")
    servers = serve(pipes_basename=pipes)
    (address,) = servers.addresses()
    run = learn(pipes_basename=pipes, num_servers=1)
    run.wait_for_updates(1)
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(address.partition(":")[2])  # and says nothing
        with socket.socket(socket.AF_UNIX) as peer, contextlib.suppress(OSError):
            peer.connect(address.partition(":")[2])
            peer.sendall(GARBAGE * 10)
        channel = stack.enter_context(grpc.insecure_channel(address))
        stream = channel.stream_stream("/torchbeast.wire.EnvServer/Stream")
        for message, status, words in (
            (AGENT_HELLO_OF_VERSION_1, "FAILED_PRECONDITION", "install the same"),
            (GARBAGE, "INVALID_ARGUMENT", ""),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(stream(iter([message]), timeout=20))
            assert error.value.code().name == status
            assert words in error.value.details()
        run.wait_for_updates(5)
    run.process.send_signal(signal.SIGINT)
    run.wait_for_end(130)
    run.assert_no_error()
    assert {row["reconnects"] for row in assert_whole_updates(run)} == {"0"}
    servers.process.send_signal(signal.SIGTERM)
    servers.wait_for_end(143)
