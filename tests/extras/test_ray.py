"""Both variants under Ray: real Ray processes, and clusters of two nodes.

Skipped without Ray: pip install ray.
"""

import os
import signal
import statistics
import subprocess
import time

import certificates
import pytest
import runs
import watched_runs

from torchbeast.base.errors import UserError

ray = pytest.importorskip("ray")

STEPS = 1200
MONO = {**runs.SMALL, "launcher": "ray", "total_steps": STEPS}
POLY = {
    **MONO,
    "module": "torchbeast.polybeast",
    "torch_threads": 1,
    "batch_size": 3,
    "connect_timeout": 200,  # servers import packages, with a lower priority
}
BOTH = pytest.mark.parametrize("flags", [MONO, POLY], ids=["mono", "poly"])
FOREVER = 10**9
# Ray and its actors start in 15 s, but on a busy machine in minutes.
PATIENCE = 300
# One at a time: they look for any Ray actor on this machine.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.xdist_group("ray")]


def ray_actors():
    """Process ids of the Ray actors of a run on this machine."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True
    )
    lines = [line.split(maxsplit=1) for line in listed.stdout.splitlines()]
    names = ("ray::Player", "ray::EnvServer")
    return [int(pid) for pid, args in lines if args.startswith(names)]


@pytest.fixture(autouse=True)
def priority(monkeypatch):
    """Ray gives its actors 15, with which other tests leave them no CPU."""
    monkeypatch.setenv("RAY_worker_niceness", "0")


def start_learning(folder, **flags):
    """A run without end that has learned something."""
    process = runs.start(folder, "ray", **{**flags, "total_steps": FOREVER})
    runs.wait_for_rows(process, folder, "ray", 20, timeout=PATIENCE)
    return process


def finish(process):
    return runs.finish(process, PATIENCE)


def wait_for(wanted, what, process):
    deadline = time.monotonic() + PATIENCE
    while not wanted():
        assert process.poll() is None, runs.finish(process)
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.1)


def wait_for_words(folder, words, process):
    log = folder / "ray" / "out.log"
    wait_for(lambda: words in log.read_text(), words, process)


def wait_for_replacement(folder, process, flags):
    if "module" not in flags:
        wait_for_words(folder, "Ray has replaced it", process)
    else:
        wait_for_words(folder, "A stream is lost", process)
        wait_for(lambda: has_both_streams(folder), "second stream", process)
    # The newest row may be from before the loss.
    wait_for(lambda: len(ray_actors()) == 2, "second Ray actor", process)


def has_both_streams(folder):
    return int(runs.read_logs(folder, "ray")[-1]["streams"]) == 2


def learns_on(folder, process):
    rows = len(runs.read_logs(folder, "ray"))
    runs.wait_for_rows(process, folder, "ray", rows + 50, timeout=PATIENCE)


def stop(process):
    """Ctrl-C in a terminal, which all processes get; nothing may be left."""
    os.killpg(process.pid, signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert "The run failed" not in output
    assert "Saved" in output
    assert_nothing_left()


def assert_nothing_left():
    deadline = time.monotonic() + watched_runs.patience(30)
    while ray_actors():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("listens", "joins"),
    [
        ("0.0.0.0:5000", "10.0.0.7:5000"),
        ("[::]:5000", "10.0.0.7:5000"),
        ("10.0.0.8:5000", "10.0.0.8:5000"),
        ("unix:/tmp/learner", "unix:/tmp/learner"),
    ],
)
def test_an_address_of_all_networks_is_joined_at_one(listens, joins, monkeypatch):
    from torchbeast.extras.ray import servers

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    assert servers.joined_address(listens) == joins
    for address in ("0.0.0.0:0", "10.0.0.8:0"):
        with pytest.raises(UserError, match="name a port"):
            servers.joined_address(address)


@pytest.fixture
def cluster():
    """A Ray cluster with a CPU each on two nodes. The run belongs to the first."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    # Of several nodes with its own address, a run takes any.
    nodes.second = nodes.add_node(num_cpus=1, node_ip_address="127.0.0.2")
    yield nodes
    nodes.shutdown()


@pytest.fixture
def secrets(tmp_path):
    """A token, and a certificate for the name `learner`."""
    made = certificates.Certificates(tmp_path)
    made.make("learner", "DNS:learner")
    token = tmp_path / "token"
    token.write_text("sesame")
    identity = made.identity("learner")
    return {**identity, "token_file": token, "tls_server_name": "learner"}


@BOTH
def test_a_run_on_this_machine(tmp_path, flags):
    output = runs.run(tmp_path, "ray", PATIENCE, **flags)
    assert "Ray runs 2 actors on" in output
    rows = runs.read_logs(tmp_path, "ray")
    steps = flags["batch_size"] * flags["unroll_length"]
    assert [int(row["step"]) for row in rows] == list(range(steps, STEPS + 1, steps))
    assert any(float(row["mean_game_return"] or 0) > 5 for row in rows)
    # With the first weights for ever, it would be half of the updates.
    assert 0 < statistics.median(float(row["policy_lag"]) for row in rows) < 20
    module = flags.get("module", "torchbeast.monobeast")
    output = runs.run(tmp_path, "ray", PATIENCE, module=module, total_steps=STEPS + 100)
    assert f"Resuming at step {STEPS}." in output
    assert "Ray runs 2 actors on" in output
    flags = {"module": module, "total_steps": STEPS + 200, "launcher": "processes"}
    output = runs.run(tmp_path, "ray", PATIENCE, **flags)
    assert "Resuming at step 13" in output
    assert "Ray" not in output


@BOTH
def test_an_actor_that_dies_or_hangs_is_replaced(tmp_path, flags, monkeypatch):
    fault = tmp_path / "fault"
    monkeypatch.setenv("FAULT_FILE", str(fault))
    flags = {**flags, "env": "faulty:Environment", "actor_timeout": 30}
    process = start_learning(tmp_path, **flags)
    victims = ray_actors()
    assert len(victims) == 2
    os.kill(victims[0], signal.SIGKILL)
    wait_for_replacement(tmp_path, process, flags)
    learns_on(tmp_path, process)
    others = ray_actors()
    fault.write_text("one_holds_the_lock")
    wait_for(lambda: len({*ray_actors()} - {*others}) == 1, "third actor", process)
    if "module" in flags:
        wait_for(lambda: has_both_streams(tmp_path), "second stream", process)
    learns_on(tmp_path, process)
    stop(process)


@BOTH
def test_sigterm_saves(tmp_path, flags):
    """Ray has a handler of its own for this signal."""
    process = start_learning(tmp_path, **flags)
    process.terminate()
    output = finish(process)
    assert process.returncode == 143, output
    assert "Saved" in output
    assert_nothing_left()


@BOTH
def test_the_learner_is_killed(tmp_path, flags):
    process = start_learning(tmp_path, **flags)
    assert len(ray_actors()) == 2
    process.kill()
    assert_nothing_left()


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
@BOTH
def test_a_process_of_ray_is_killed(tmp_path, flags, name, monkeypatch):
    """The run saves, says why it ends, and leaves no process."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "3")
    process = start_learning(tmp_path, **flags)
    session = watched_runs.processes_of_session(process.pid)
    (victim,) = [p.pid for p in session if f"/{name}" in p.command.split()[0]]
    os.kill(victim, signal.SIGSTOP)
    time.sleep(0.5)  # now a call of Ray waits for an answer
    os.kill(victim, signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1, output
    assert "ProcessError: the process that calls Ray (pid" in output
    assert "died with exit status 1. Ray ends it if the raylet of this" in output
    assert "Saved" in output
    assert "Traceback" not in output
    watched_runs.wait_until(
        lambda: not watched_runs.processes_of_session(process.pid), "no process", 60
    )


@BOTH
def test_a_node_dies(tmp_path, cluster, secrets, flags):
    """Its actor goes on at another. In PolyBeast with a token and certificates."""
    folder = tmp_path
    # Without an authority the servers trust the learner's certificate itself.
    flags = flags | (secrets if "module" in flags else {})
    process = start_learning(folder, **flags, ray_address=cluster.address)
    assert len(ray_actors()) == 2
    cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3")
    cluster.remove_node(cluster.second, allow_graceful=False)
    wait_for_replacement(folder, process, flags)
    learns_on(folder, process)
    stop(process)


@BOTH
def test_an_environment_raises(tmp_path, flags, monkeypatch):
    """MonoBeast's run ends; PolyBeast's survives --max_env_failures of them."""
    fault = tmp_path / "fault"
    monkeypatch.setenv("FAULT_FILE", str(fault))
    process = start_learning(tmp_path, **{**flags, "env": "faulty:Environment"})
    fault.write_text("raise_error")
    if "module" in flags:  # PolyBeast
        wait_for_words(tmp_path, "An environment raised", process)
        fault.unlink()
        wait_for(lambda: has_both_streams(tmp_path), "second stream", process)
        learns_on(tmp_path, process)
        fault.write_text("raise_error")
    output = finish(process)
    assert process.returncode == 1
    assert "ValueError: the ball left the table" in output


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ray_address": "127.0.0.1:1"}, "no Ray cluster at --ray_address 127.0.0.1:1"),
        ({"sync": True}, "--sync and torchrun need --launcher processes"),
        ({"env": "faulty:NoPlace"}, "NoPlace"),
    ],
)
@BOTH
def test_what_can_not_work(tmp_path, flags, wrong, words):
    process = runs.start(tmp_path, "ray", **{**flags, **wrong})
    output = finish(process)
    assert process.returncode == 1
    assert words in output
    assert "Traceback" not in output


def test_no_room_at_the_start(tmp_path):
    output = finish(
        runs.start(tmp_path, "ray", **MONO | {"num_actors": 200, "actor_timeout": 20})
    )
    assert "Ray did not start 200 actors within 20 s" in output
