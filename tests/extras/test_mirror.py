"""--mirror: real runs, and a real server that speaks S3, in a process of its own."""

import contextlib
import csv
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import fsspec
import pytest
import runs
import torch
import watched_runs

from torchbeast.base.errors import FlagError
from torchbeast.extras import mirror

ENDLESS = {**runs.SMALL, "total_steps": 10**9, "checkpoint_interval": 0.5}


@pytest.fixture
def s3(monkeypatch):
    """Starts a server with an empty bucket; returns its port."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")

    started = []

    def start(**variables):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
        process = subprocess.Popen(
            list(map(str, words)),
            env={**os.environ, **variables},
            stderr=subprocess.DEVNULL,
        )
        started.append(process)

        def listens():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 1),
            ):
                return True

        watched_runs.wait_until(listens, "the server listens", 60)
        for name, value in {
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }.items():
            monkeypatch.setenv(name, value)
        at(port).mkdir("bucket")
        return port

    yield start
    for process in started:
        process.kill()
        process.wait()


def at(port):
    """The file system of a server, whatever the variables say."""
    return fsspec.filesystem("s3", endpoint_url=f"http://127.0.0.1:{port}")


def save(folder, step, size=10, copier=None):
    """What a run does at a checkpoint: it has rows up to its step, and model.tar."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = {"date_start": "2026-01-01T00:00:00+00:00"}
    (folder / "meta.json").write_text(json.dumps(begun))
    with (folder / "logs.csv").open("a") as file:
        file.write(f"{step}\n")
    weights = torch.randint(0, 255, (size,), dtype=torch.uint8)
    state = {"stats": {"step": step}, "weights": weights}
    torch.save(state, folder / "new")
    (folder / "new").replace(folder / "model.tar")
    if copier:
        copier.saved(folder / "model.tar", step)


def fetch(url, folder, step):
    folder.mkdir(parents=True, exist_ok=True)  # as a run does before
    return mirror.fetch(types.SimpleNamespace(mirror=url), folder, step)


def step_of(data):
    return torch.load(io.BytesIO(data), weights_only=True)["stats"]["step"]


def marker_of(folder):
    with contextlib.suppress(FileNotFoundError):
        return json.loads((folder / "mirror.json").read_text())
    return {"step": 0}


@pytest.fixture
def url(monkeypatch, tmp_path):
    """A folder for copies, which come soon."""
    monkeypatch.setattr(mirror, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(mirror, "RETRY_SECONDS", 0.01)
    (tmp_path / "mirror").mkdir()
    return str(tmp_path / "mirror")


# --- Whole runs


@pytest.mark.parametrize("kind", ["monobeast on s3", "polybeast on a disk"])
def test_a_killed_run_goes_on_on_an_empty_machine(tmp_path, s3, kind):
    module = f"torchbeast.{kind.partition(' ')[0]}"
    if "polybeast" in kind:
        copies, url = fsspec.filesystem("file"), str(tmp_path / "mirror")
        (tmp_path / "mirror").mkdir()
    else:
        copies, url = at(s3()), "s3://bucket/of/runs"
    root = url.removeprefix("s3://") + "/mine"
    flags = {**ENDLESS, "module": module, "batch_size": 3}
    run = runs.start(tmp_path / "a", "mine", **flags, mirror=url)
    copies.invalidate_cache()

    def step():
        with contextlib.suppress(FileNotFoundError):
            return json.loads(copies.cat_file(f"{root}/mirror.json"))["step"]

    watched_runs.wait_until(step, "a checkpoint in the mirror", 120)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait(60)
    mirrored = step_of(copies.cat_file(f"{root}/model.tar"))
    # It went on while it copied: the second has to end behind what it has saved.
    left = step_of((tmp_path / "a" / "mine" / "model.tar").read_bytes())
    output = runs.run(
        *(tmp_path / "b", "mine"), module=module, mirror=url, total_steps=left + 600
    )
    assert f"Resuming at step {mirrored}." in output
    assert "was not closed by its" in output, "the first process, as it was killed"
    rows, before = runs.read_logs(tmp_path / "b", "mine"), {}
    for row in runs.read_logs(tmp_path / "a", "mine"):
        before[row["_tick"]] = row
    kept = [row for row in rows if int(row["step"]) <= mirrored]
    assert kept
    assert kept == [before[row["_tick"]] for row in kept]
    assert int(kept[-1]["step"]) == mirrored
    assert [int(row["_tick"]) for row in rows] == list(range(len(rows)))
    assert int(rows[-1]["step"]) >= left + 600
    # At its end, the run has copied all.
    for name in ("model.tar", "logs.csv", "meta.json", "out.log"):
        assert (
            copies.cat_file(f"{root}/{name}")
            == (tmp_path / "b" / "mine" / name).read_bytes()
        ), name
    marker = json.loads(copies.cat_file(f"{root}/mirror.json"))
    assert marker["writer"] is None
    assert marker["step"] == int(rows[-1]["step"])
    # A folder that was left behind takes part again.
    output = runs.run(tmp_path / "a", "mine", module=module, mirror=url)
    assert "Fetching" in output
    assert "is at step" in output
    assert runs.read_logs(tmp_path / "a", "mine") == rows


def test_places_that_do_not_work(tmp_path, s3):
    s3(INITIAL_NO_AUTH_ACTION_COUNT="3")  # enough to make the bucket
    (tmp_path / "file").touch()
    for url, words in {
        "s3://bucket": "Access Key Id",
        str(tmp_path / "nowhere"): "No such file or directory",
        str(tmp_path / "file"): "Not a directory",
        "nothing://at/all": "Protocol not known: nothing",
        "s3://me:secret@bucket": "has a password",
        str(tmp_path): "would be in the run's folder",
        str(tmp_path / "a"): "would be in the run's folder",
    }.items():
        output = runs.run(tmp_path, "a", **runs.SMALL, mirror=url, status=1)
        assert words in output, url
        assert "Traceback" not in output, output
    assert not (tmp_path / "a").exists()
    flags = {**runs.SMALL, "disable_checkpoint": True, "mirror": str(tmp_path)}
    output = runs.run(tmp_path, "a", **flags, status=1)
    assert "has no effect with --disable_checkpoint" in output


# --- Copies


def test_a_copy_that_is_cut_at_any_byte(tmp_path, url, monkeypatch):
    """The mirror keeps its last checkpoint, and gets the next once it can."""
    folder, copy = tmp_path / "a", tmp_path / "mirror" / "a"
    save(folder, 1)
    copier = mirror.Mirror(url, folder)
    watched_runs.wait_until(lambda: marker_of(copy)["step"] == 1, "the first copy")
    for step, left in enumerate((0, 10, 1000), start=2):

        def cut(source, target, left=left):
            target.write(source.read(left))
            raise OSError("the connection is lost")

        monkeypatch.setattr(mirror.shutil, "copyfileobj", cut)
        failures = copier.failures
        save(folder, step, 6_000, copier)
        watched_runs.wait_until(lambda n=failures: copier.failures > n, "a failure")
        assert step_of((copy / "model.tar").read_bytes()) == step - 1
        assert marker_of(copy)["step"] == step - 1
        monkeypatch.undo()
        monkeypatch.setattr(mirror, "RETRY_SECONDS", 0.01)
        watched_runs.wait_until(lambda n=step: marker_of(copy)["step"] == n, "a copy")
        assert step_of((copy / "model.tar").read_bytes()) == step
    copier.close(0)
    assert marker_of(copy)["writer"] is None
    assert not list(copy.glob("*.part"))


def test_a_server_that_hangs_at_the_end(tmp_path, url, monkeypatch, caplog):
    monkeypatch.setattr(mirror, "CLOSE_SECONDS", 1.0)
    save(tmp_path / "a", 1)
    copier = mirror.Mirror(url, tmp_path / "a")
    watched_runs.wait_until(lambda: copier.copied_at, "the first copy")
    until = threading.Event()
    monkeypatch.setattr(copier._place, "upload", lambda *_: until.wait())
    save(tmp_path / "a", 2, copier=copier)
    begun = time.monotonic()
    copier.close(0)
    assert 1 <= time.monotonic() - begun < runs.patience(5)
    assert "lacks the newest logs.csv, meta.json, model.tar" in caplog.text
    until.set()


def test_the_rows_of_a_checkpoint_are_there_before_it(tmp_path, url):
    """Checkpoints come faster than copies, and a reader finds each whole."""
    folder, copy = tmp_path / "a", tmp_path / "mirror" / "a"
    save(folder, 1)
    copier = mirror.Mirror(url, folder)
    seen, step, until = set(), 1, time.monotonic() + watched_runs.patience(20)
    while time.monotonic() < until and len(seen) < 10:
        step += 1
        save(folder, step, 300_000, copier)
        with contextlib.suppress(FileNotFoundError):
            # The rows last: all three may become newer in between.
            marked = marker_of(copy)["step"]
            found = step_of((copy / "model.tar").read_bytes())
            with (copy / "logs.csv").open() as file:
                rows = [int(row[0]) for row in csv.reader(file)]
            assert rows[-1] >= max(found, marked)
            seen.add(found)
    assert len(seen) > 3
    copier.close(0)
    assert step_of((copy / "model.tar").read_bytes()) == step == marker_of(copy)["step"]


def test_what_is_copied(tmp_path, url):
    folder = tmp_path / "a[1]*"  # no pattern
    save(folder, 1)
    others = "wandb/run.wandb", ".model.tar.tmp", "console.log"
    for name in ("sources/mine.py", *others):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (folder / "link").symlink_to("/etc/passwd")
    mirror.Mirror(url, folder).close(0)
    copy = tmp_path / "mirror" / "a[1]*"
    names = [str(x.relative_to(copy)) for x in copy.rglob("*") if x.is_file()]
    expected = ["logs.csv", "meta.json", "mirror.json", "model.tar", "sources/mine.py"]
    assert sorted(names) == expected
    fetch(url, tmp_path / "b" / folder.name, None)
    assert (tmp_path / "b" / folder.name / "sources" / "mine.py").exists()


# --- Which one wins


def test_of_two_checkpoints_the_later_one_is_kept(tmp_path, url):
    save(tmp_path / "a", 5)
    mirror.Mirror(url, tmp_path / "a").close(0)
    for step, expected in ((None, 5), (4, 5), (5, 5), (6, 6)):
        folder = tmp_path / str(step) / "a"
        if step:
            save(folder, step)
        before = (folder / "model.tar").read_bytes() if step else b""
        assert fetch(url, folder, step) == (step in (None, 4))
        after = (folder / "model.tar").read_bytes()
        assert step_of(after) == expected
        assert (after == before) == (step in (5, 6))


def test_another_run_of_the_same_name_is_refused(tmp_path, url):
    save(tmp_path / "a", 5)
    mirror.Mirror(url, tmp_path / "a").close(0)
    other = tmp_path / "b" / "a"
    for step in (4, 6):
        save(other, step)
        (other / "meta.json").write_text('{"date_start": "2026-02-02T00:00:00+00:00"}')
        before = (other / "model.tar").read_bytes()
        with pytest.raises(
            FlagError, match="another run named a, which began at '2026"
        ):
            fetch(url, other, step)
        assert (other / "model.tar").read_bytes() == before


def test_of_two_processes_that_write_the_later_one_goes_on(
    tmp_path, url, caplog, monkeypatch
):
    copy = tmp_path / "mirror" / "a"
    save(tmp_path / "a", 5)
    first = mirror.Mirror(url, tmp_path / "a")
    watched_runs.wait_until(lambda: first.copied_at, "the first copy")
    assert "was not closed" not in caplog.text
    save(tmp_path / "b" / "a", 6)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    second = mirror.Mirror(url, tmp_path / "b" / "a")
    assert f"was not closed by its 'process {os.getpid()} of" in caplog.text
    watched_runs.wait_until(lambda: second.copied_at, "the second copy")
    save(tmp_path / "a", 7, copier=first)
    watched_runs.wait_until(lambda: not first._thread.is_alive(), "the first ends")
    assert "No more copies: 'process" in caplog.text
    assert first.failures == 1
    first.close(0)
    assert marker_of(copy)["writer"] == second._writer
    second.close(0)
    assert marker_of(copy)["writer"] is None
    assert step_of((copy / "model.tar").read_bytes()) == marker_of(copy)["step"] == 6


def test_a_fetch_that_was_cut_off_is_made_up_for(tmp_path, url, monkeypatch):
    save(tmp_path / "a", 5)
    mirror.Mirror(url, tmp_path / "a").close(0)
    folder, write = tmp_path / "b" / "a", mirror.atomic_write

    def cut(path):
        if path.name == "model.tar":
            raise ValueError("cut")
        return write(path)

    monkeypatch.setattr(mirror, "atomic_write", cut)
    with pytest.raises(FlagError, match="cut"):
        fetch(url, folder, None)
    assert (folder / "logs.csv").exists()
    assert not (folder / "model.tar").exists()
    monkeypatch.undo()
    assert fetch(url, folder, None)


def test_files_that_nobody_should_write(tmp_path):
    files, root = fsspec.filesystem("memory"), "/hostile/a"
    save(tmp_path / "a", 5)
    for name in ("model.tar", "../b", ".hidden", "x/../../c", "wandb/d", "/e", "new"):
        data = (tmp_path / "a" / "model.tar").read_bytes()
        files.store[f"{root}/{name}"] = fsspec.implementations.memory.MemoryFile(
            files, f"{root}/{name}", data
        )
    folder = tmp_path / "there" / "inside" / "a"
    assert fetch("memory://hostile", folder, None)
    found = [x for x in (tmp_path / "there").rglob("*") if x.is_file()]
    assert sorted(found) == [folder / "model.tar", folder / "new"]


@pytest.mark.parametrize("text", ["", "[]", '{"more": 1}', "\xff"])
def test_a_damaged_marker(tmp_path, url, text):
    (tmp_path / "mirror" / "a").mkdir()
    (tmp_path / "mirror" / "a" / "mirror.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FlagError, match=r"mirror.json is damaged"):
        fetch(url, tmp_path / "a", None)
