"""PolyBeast's servers and learner, started apart, and faults between them.

Real processes, each in a session of its own. Training goes on where it can, and ends
loudly where it can't; test_polybeast.py has the faults of both started together.
"""

import os
import pathlib
import signal
import time

import runs
import torch
from certificates import Certificates
from watched_runs import END_SECONDS, processes_of_session, wait_until
from watched_servers import E, T, assert_says, assert_whole_updates, rows_of

# --- Servers die ----------------------------------------------------------------------


def test_servers_killed_in_turn(serve, learn, pipes):
    """The programs that their environments have started end."""
    flags = {"pipes_basename": pipes, "num_servers": 2, "env": "faulty:WithProgram"}
    servers = serve(**flags)
    servers.addresses(2)
    run = learn(**flags, num_actors=4)
    run.wait_for_updates(2)
    programs = set()
    for kills in (1, 2):
        (victim, *_) = servers.children()  # the one that has lived longest
        there = processes_of_session(servers.pid)
        own = {p.pid for p in there if p.parent == victim and "sleep" in p.command}
        assert len(own) >= 2 * E, "of two streams"
        programs |= own
        os.kill(victim, signal.SIGKILL)
        run.wait_for(
            lambda kills=kills: int(rows_of(run)[-1]["reconnects"]) == 2 * kills,
            "both streams of the server came back",
        )
        run.wait_for_updates(5)
    assert not programs & {p.pid for p in processes_of_session(servers.pid)}
    run.end()
    run.assert_no_error()
    rows = assert_whole_updates(run)
    assert int(rows[-1]["reconnects"]) == 4
    # Of each lost stream less than an unroll, and one that waits for the queue.
    assert int(rows[-1]["dropped_steps"]) <= 4 * E * T
    assert run.console.count("Reconnects 4, dropped steps ") == 1
    assert servers.console.count(" died by signal SIGKILL") == 2
    servers.end()


def test_a_lost_stream_ends_a_run_with_sync(serve, learn, pipes):
    servers = serve(pipes_basename=pipes, num_servers=2)
    servers.addresses(2)
    sync = {"sync": True, "disable_checkpoint": True}
    run = learn(pipes_basename=pipes, num_servers=2, **sync)
    run.wait_for_updates(2)
    os.kill(servers.children()[0], signal.SIGKILL)
    run.wait_for_end(1)
    assert_says(run, "ServerError: a stream was lost", "--sync")
    servers.end()


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
    servers.end()
    run.end()


def test_joined_servers_end_when_the_run_is_complete(serve, learn, tmp_path):
    address = f"unix:{tmp_path}/learner"
    servers = serve(join=address, num_servers=2)
    run = learn(listen=address, num_actors=2)
    run.wait_for_updates(2)
    run.end()
    wait_until(lambda: "Waiting for a learner" in servers.console, "they dial again")
    step = int(rows_of(run)[-1]["step"]) + 10 * 2 * E * T
    run = learn(listen=address, num_actors=2, total_steps=step)
    run.wait_for_end(0)
    ended_at = time.monotonic()
    servers.wait_for_end(0)
    assert time.monotonic() - ended_at < runs.patience(5)
    assert "The learner has completed its run." in servers.console
    assert "A stream is lost" not in run.console


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
    assert "] EnvironmentsFailed: more than 8 environments have raised" in run.console
    assert "ValueError: the ball left the table" in run.console
    assert "in raise_error" in run.console, "the environment's traceback"
    run.assert_files()
    # The fault is over: the next learner finds the servers as if nothing had been.
    fault.unlink()
    step = int(rows_of(run)[-1]["step"])
    run = learn(
        pipes_basename=pipes, num_servers=1, total_steps=step + 10 * 2 * E * T, **env
    )
    run.wait_for_end(0)
    assert f"Resuming at step {step}." in run.console
    servers.end(signal.SIGINT)


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

    run = learn(pipes_basename=pipes, num_servers=2, total_steps=step + 20 * 2 * E * T)
    run.wait_for_end(0)
    run.assert_no_error()
    assert f"Resuming at step {step}." in run.console
    rows = assert_whole_updates(run)
    assert int(rows[-1]["step"]) == step + 20 * 2 * E * T
    assert len(rows) == int(rows[-1]["step"]) // (2 * E * T), "no row twice or lost"
    assert servers.children() == children, "the servers have stayed"
    servers.end()


# --- Who is who -----------------------------------------------------------------------


def assert_refused(learn, cases):
    """Learners with the flags of each case end soon, with these words; all at once."""
    started = {name: learn(name, **flags) for name, (flags, _) in cases.items()}
    for name, run in started.items():
        run.wait_for_end(1, 4 * END_SECONDS)  # nothing but four starts at once
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
    foreign_client = certificates.identity("foreign-client")
    assert_refused(
        learn,
        {
            "wrong-token": ({**us, **here, "token_file": wrong}, refused),
            "foreign-client": (
                {**us, **here, **foreign_client},
                [*never, "it ends the connection", "foreign-client.pem"],
            ),
            "foreign-ca": (
                {**us, **here, **foreign},
                [*never, "certificate of the other side is not valid"],
            ),
            "no-tls": ({**here, "token_file": token}, [*never, "it speaks TLS"]),
        },
    )
    run.wait_for_updates(3)  # the others are none of its business
    run.end()
    run.assert_no_error()
    servers.end()
