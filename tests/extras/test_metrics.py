"""--metrics_port: what Prometheus and probes get from real runs and servers."""

import os
import signal
import socket
import threading
import time
import types
import urllib.error
import urllib.request

import pytest
import runs
import watched_runs

from torchbeast.base import parts
from torchbeast.extras import metrics

parser = pytest.importorskip("prometheus_client.parser")


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def get(port, path):
    """The status and the text of the answer; None if nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", None, 20) as x:
            return x.status, x.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return None


def scrape(port):
    """The values by their names."""
    _, text = get(port, "/metrics")
    families = parser.text_string_to_metric_families(text)
    return {x.name: x.value for family in families for x in family.samples}


@pytest.mark.parametrize("module", ["torchbeast.monobeast", "torchbeast.polybeast"])
def test_a_run_has_the_numbers_of_its_logs(tmp_path, port, module):
    flags = {**runs.SMALL, "module": module, "batch_size": 3, "total_steps": 10**9}
    (tmp_path / "mirror").mkdir()
    more = {"metrics_port": port, "mirror": tmp_path / "mirror"}
    run = runs.start(tmp_path, "a", **flags, **more)
    runs.wait_for_rows(run, tmp_path, "a", 60, 150)
    found, scraped = scrape(port), time.time()
    assert get(port, "/livez") == get(port, "/readyz") == (200, "ok\n")
    runs.wait_for_rows(run, tmp_path, "a", 100, 150)
    output = runs.run(tmp_path, "b", 150, status=1, **flags, metrics_port=port)
    assert f"--metrics_port {port}: Address already in use" in output
    assert "Traceback" not in output
    os.kill(run.pid, signal.SIGINT)
    output = runs.finish(run, 150)
    assert run.returncode == 130, output
    assert get(port, "/livez") is None
    rows = runs.read_logs(tmp_path, "a")
    (row,) = (x for x in rows if float(x["step"]) == found["torchbeast_step"])
    counters = {"reconnects", "dropped_steps"}
    for name, value in row.items():
        if value and name not in ("_tick", "_time"):
            name += "_total" * (name in counters | {"refused", "env_failures"})
            assert found[f"torchbeast_{name}"] == float(value), name
    if module.endswith("polybeast"):
        assert found["torchbeast_streams"] == 2
        assert found["torchbeast_reconnects_total"] == 0
    learned = found["torchbeast_last_batch_timestamp_seconds"]
    assert learned == pytest.approx(float(row["_time"]), abs=60)
    assert learned <= scraped
    assert found["torchbeast_run_info"] == 1
    assert found["process_resident_memory_bytes"] > 1e7
    assert found["torchbeast_mirror_failures_total"] == 0
    assert not (tmp_path / "b").exists()


def test_environment_servers(tmp_path, port):
    flags = {
        "env": "CartPole-v1",
        "num_servers": 2,
        "pipes_basename": f"unix:{tmp_path}/socket",
        "metrics_port": port,
    }
    words = runs.command(tmp_path, "", "torchbeast.polybeast_env", **flags)
    del words[3:7]  # --savedir and --xpid
    servers = runs.start_words(words)
    watched_runs.wait_until(lambda: get(port, "/livez"), "an answer", 60)
    seen = set()
    deadline = time.monotonic() + 150
    while (ready := get(port, "/readyz")) != (200, "ok\n"):
        seen.add(ready)
        assert get(port, "/livez") == (200, "ok\n")
        assert time.monotonic() < deadline, seen
    assert any(x and x[0] == 503 for x in seen), seen
    found = scrape(port)
    assert found["torchbeast_servers_ready"] == 2
    assert found["torchbeast_server_starts_total"] == 2
    pid = next(
        x.pid
        for x in watched_runs.processes_of_session(servers.pid)[::-1]
        if "spawn_main" in x.command
    )
    os.kill(pid, signal.SIGKILL)
    watched_runs.wait_until(
        lambda: scrape(port)["torchbeast_server_starts_total"] == 3, "a start", 60
    )
    watched_runs.wait_until(lambda: get(port, "/readyz")[0] == 200, "ready", 60)
    os.kill(servers.pid, signal.SIGTERM)
    runs.finish(servers, 60)


def run_with(**flags):
    flags = {"metrics_host": "127.0.0.1", "xpid": "a", "env": "b"} | flags
    flags |= {"total_steps": 100, "actor_timeout": 3.0}
    return types.SimpleNamespace(
        flags=types.SimpleNamespace(**flags),
        guests=parts.Guests(),
        saving=False,
        round_at=time.monotonic(),
    )


@pytest.fixture
def tracker(port):
    made = metrics.Metrics(run_with(metrics_port=port))
    yield made
    made.close(0)


def test_a_main_loop_that_hangs(tracker, port):
    """Not while it saves, which may take long."""
    run = tracker._run
    assert get(port, "/livez") == (200, "ok\n")
    run.round_at -= 605
    assert get(port, "/livez") == (503, "the main loop hangs for 605 s\n")
    run.saving = True
    assert get(port, "/livez")[0] == 200
    run.saving, run.flags.actor_timeout = False, 250.0
    assert get(port, "/livez")[0] == 200


def test_readiness_follows_from_the_batches(tracker, port, monkeypatch):
    no_batch = 503, "no batch for 300 s\n"
    assert get(port, "/readyz") == no_batch
    now = time.time()
    monkeypatch.setattr(metrics.time, "time", lambda: now)
    tracker.row({"step": 1, "mean_return": None, "a-b": 1.5})
    now += 299
    assert get(port, "/readyz") == (200, "ok\n")
    now += 2
    assert get(port, "/readyz") == no_batch
    tracker.row({"step": 100})  # all
    now += 2000
    assert get(port, "/readyz")[0] == 200
    assert scrape(port)["torchbeast_a_b"] == 1.5  # the newest value


def test_clients_that_say_nothing(tracker, port, monkeypatch):
    """They neither delay an answer nor take all threads."""
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    begun = time.monotonic()
    assert get(port, "/livez") == (200, "ok\n")
    assert time.monotonic() - begun < runs.patience(4)
    monkeypatch.setattr(metrics, "MOST_THREADS", 1)  # this one
    with socket.create_connection(("127.0.0.1", port), 3) as one_more:
        assert one_more.recv(1) == b"", "closed at once"
    monkeypatch.undo()
    watched_runs.wait_until(lambda: threading.active_count() <= before, "an end", 30)
    assert get(port, "/livez")[0] == 200
    for one in silent:
        one.close()
