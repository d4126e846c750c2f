"""The files of a run: logs.csv, meta.json, out.log, and how they are written."""

import contextlib
import json
import logging
import math
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import runs
import torch

from torchbeast.base.errors import FileError
from torchbeast.core.columns import spread
from torchbeast.runs import files
from torchbeast.runs.files import RunFileError, RunFolder, atomic_write

ARGS = {"env": "CartPole-v1", "seed": 3, "reward_clipping": None, "discounting": 0.99}


def read_rows(path):
    return runs.read_logs(path.parent, path.name)


def read_meta(path):
    return json.loads((path / "meta.json").read_text())


class FileWriter(files.FileWriter):
    """One that locks its folder and unlocks it, as a run does around its writer."""

    def __init__(self, savedir, xpid="run", *arguments, **more):
        self.folder = RunFolder(str(savedir), xpid)
        try:
            super().__init__(self.folder, *(arguments or [ARGS]), **more)
        except BaseException:
            self.folder.close()
            raise

    def close(self, *arguments, **more):
        super().close(*arguments, **more)
        self.folder.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def run_python(code, *arguments, prefix=()):
    return subprocess.run(
        [*prefix, sys.executable, "-c", code, *map(str, arguments)],
        cwd=runs.ROOT,
        capture_output=True,
        text=True,
        timeout=runs.patience(60),
    )


@pytest.fixture
def started(tmp_path):
    """A closed run with steps 0, 15, …, 90 in ticks 0 … 6."""
    writer = FileWriter(tmp_path)
    for tick in range(7):
        writer.log({"step": 15 * tick, "total_loss": tick / 3})
    writer.close(exit_status=1)
    return writer.path


def test_files_of_a_run(tmp_path):
    before = time.time()
    writer = FileWriter(tmp_path / "new" / "folder")
    assert writer.path == tmp_path / "new" / "folder" / "run"
    writer.log({"step": 15, "total_loss": 0.1 + 0.2})
    writer.log({"b": 1, "step": 30, "total_loss": -1e-300, "a": 2})
    writer.log({"step": 45, "a": 3})
    # Read while the run goes on: each line is there as soon as log() returns.
    rows = read_rows(writer.path)
    assert list(rows[0]) == ["_tick", "_time", "step", "total_loss", "b", "a"]
    cells = [(row["_tick"], row["step"], row["b"], row["a"]) for row in rows]
    assert cells == [("0", "15", "", ""), ("1", "30", "1", "2"), ("2", "45", "", "3")]
    assert [float(x["total_loss"] or "nan") for x in rows[:2]] == [0.1 + 0.2, -1e-300]
    assert before <= float(rows[0]["_time"]) <= float(rows[1]["_time"]) <= time.time()
    writer.close(exit_status=0)
    assert names(writer.path) == ["logs.csv", "meta.json", "out.log"]


def test_floats_round_trip_exactly(tmp_path):
    draw = random.Random(5)
    values = [draw.uniform(-1, 1) * 10 ** draw.randint(-300, 300) for _ in range(50)]
    writer = FileWriter(tmp_path)
    for value in values:
        row = {"float": value, "np": np.float64(value), "torch": torch.tensor(value)}
        writer.log(spread(row))
    writer.close(exit_status=0)
    rows = read_rows(writer.path)
    assert [float(row["float"]) for row in rows] == values
    assert [float(row["np"]) for row in rows] == values
    kept = [np.float32(row["torch"]) for row in rows]
    assert kept == [torch.tensor(value).numpy() for value in values]


def test_out_log(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    handlers = list(logging.getLogger().handlers)
    writer = FileWriter(tmp_path)
    logging.getLogger("torchbeast.monobeast").info("Return is %d.", 21)
    writer.close(exit_status=0)
    logging.getLogger("torchbeast.monobeast").info("After the end.")
    assert logging.getLogger().handlers == handlers
    text = (writer.path / "out.log").read_text()
    assert re.search(r"INFO torchbeast.monobeast:\d+\] Return is 21\.", text)
    assert "After the end." not in text


@pytest.mark.parametrize("xpid", ["", ".", "..", "latest", "a/b", "/tmp/a", "../a"])
def test_bad_xpid(tmp_path, xpid):
    with pytest.raises(ValueError, match=f"got {re.escape(repr(xpid))}"):
        FileWriter(tmp_path, xpid)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(None, 0), (0, 1), (44, 3), (45, 4), (90, 7), (1000, 7)]
)
def test_resume_cuts_later_rows(started, resume_step, kept):
    before = (started / "logs.csv").read_bytes().splitlines(keepends=True)
    writer = FileWriter(started.parent, "run", {"seed": 4}, resume_step)
    cut = (started / "logs.csv").read_bytes()
    assert cut == b"".join(before[: 1 + kept] if kept else [])
    meta = read_meta(started)
    assert meta["args"] == {"seed": 4}
    assert (meta["successful"], meta["date_end"]) == (False, None)
    assert len(meta["resumed"]) == (resume_step is not None)
    writer.log({"total_loss": 2.5, "step": 999})
    writer.close(exit_status=0)
    rows = read_rows(started)
    assert [row["_tick"] for row in rows] == [str(tick) for tick in range(kept + 1)]
    assert rows[-1]["total_loss"] == "2.5"


def test_resume_cuts_a_half_written_line(started):
    """At every length of the last line, as after a crash or a power failure."""
    logs = started / "logs.csv"
    whole = logs.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for length in range(len(last)):
        for rubbish in (b"", b"\0\0\0\0"):
            logs.write_bytes(whole[: len(whole) - len(last) + length] + rubbish)
            writer = FileWriter(started.parent, resume_step=90)
            assert logs.read_bytes() == whole[: len(whole) - len(last)], length
            writer.log({"step": 105, "total_loss": 1.0})
            writer.close(exit_status=0)
            assert [row["_tick"] for row in read_rows(started)] == list("0123456")


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "_tick,_time,step\n1\n9,1,900\n"])
def test_rows_of_another_program_are_not_cut(started, text):
    (started / "logs.csv").write_text(text)
    with pytest.raises(FileError, match=r"logs\.csv is damaged"):
        FileWriter(started.parent, resume_step=90)
    assert (started / "logs.csv").read_text() == text


@pytest.mark.parametrize("damaged", ["{", "", "[1]", "[" * 90_000])
def test_resume_with_a_damaged_meta(started, caplog, damaged):
    (started / "meta.json").write_text(damaged)
    FileWriter(started.parent, resume_step=90).close(exit_status=0)
    assert read_meta(started)["successful"] is True
    assert "is ignored: " in caplog.text


def test_a_locked_folder(tmp_path):
    with contextlib.closing(RunFolder(str(tmp_path), "run")) as folder:
        for _ in range(2):
            with pytest.raises(RunFileError, match="Another process"):
                FileWriter(tmp_path)
        files.FileWriter(folder, ARGS).close(exit_status=0)
        with pytest.raises(RunFileError):
            RunFolder(str(tmp_path), "run")
    RunFolder(str(tmp_path), "run").close()
    assert (tmp_path / "run" / "meta.json").exists()
    RunFolder(str(tmp_path), "unused").close()
    assert names(tmp_path) == ["run"], "nothing was put into the other"


@pytest.mark.parametrize("savedir", ["a file", "a file/below", "/proc/nothing", "."])
def test_a_folder_that_can_not_be_made(tmp_path, savedir):
    (tmp_path / "a file").write_text("mine")
    with pytest.raises(RunFileError, match="choose another --savedir") as error:
        RunFolder(str(tmp_path / savedir), "a file" if savedir == "." else "run")
    assert savedir in str(error.value)
    assert (tmp_path / "a file").read_text() == "mine"


# Logs until the files may grow no further, as on a full disk.
FULL_DISK = """
import logging, resource, sys
from torchbeast.runs.files import FileWriter, RunFolder
logging.basicConfig(level=logging.INFO)
log = logging.getLogger("run")
writer = FileWriter(RunFolder(sys.argv[1], "run"), {"x": 1})
limit = 8192
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
rows = 0
try:
    while True:
        writer.log({"step": rows, "loss": rows / 7})
        log.info("Row %d " + 50 * "-", rows)
        rows += 1
except OSError as error:
    print(rows, error)
try:
    writer.log({"new": 1})  # needs a second file: logs.csv stays as it is
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), limit))
writer.close(exit_status=1)
"""


@pytest.mark.parametrize("room_for_meta", [8192, 16])
def test_full_disk(tmp_path, room_for_meta):
    result = run_python(FULL_DISK, tmp_path, room_for_meta)
    assert result.returncode == 0, result.stderr
    rows, error = result.stdout.strip().split(" ", 1)
    assert error.count("File too large") == 2
    assert f"{tmp_path}/run/logs.csv" in error
    assert (tmp_path / "run" / "logs.csv").read_text().endswith("\n")
    kept = read_rows(tmp_path / "run")
    assert [row["step"] for row in kept] == [str(n) for n in range(int(rows))]
    assert all(None not in row.values() for row in kept)
    assert "Logging error" not in result.stderr
    has_end = read_meta(tmp_path / "run")["date_end"] is not None
    assert has_end == (room_for_meta > 16), "as after a SIGKILL"
    assert ("Cannot write the end of the run" in result.stderr) == (not has_end)
    assert names(tmp_path / "run") == ["logs.csv", "meta.json", "out.log"]


def test_atomic_write(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(data, interrupt):
        with atomic_write(path) as file:
            file.write(data)
            file.flush()
            assert path.read_bytes() == b"old"
            if interrupt:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(b"half of the n", interrupt=True)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]
    with path.open("rb") as old:
        write(b"new", interrupt=False)
        assert old.read() == b"old", "the file was replaced, and not written to"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


def test_a_text_that_is_not_utf8_is_logged(tmp_path):
    """As in the error of an environment that reads a file with other bytes.

    In a process of its own: pytest-xdist can't report a captured log with such a text.
    """
    code = """
import logging, sys
from torchbeast.runs.files import FileWriter, RunFolder

writer = FileWriter(RunFolder(sys.argv[1], "run"), {})
text = b"bad \\xff\\xfe".decode(errors="surrogateescape")
logging.getLogger("x").error(text)
writer.close(exit_status=1, error=text)
"""
    result = run_python(code, tmp_path)
    assert r"bad \udcff\udcfe" in (tmp_path / "run" / "out.log").read_text()
    error = read_meta(tmp_path / "run")["error"]
    assert error == b"bad \xff\xfe".decode(errors="surrogateescape")
    assert "Cannot write" not in result.stderr


# --- meta.json ---


def test_meta(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "swordfish")
    args = ARGS | {"savedir": tmp_path, "clip_ratio": math.inf}
    writer = FileWriter(tmp_path, "run", args, about={"ranks": 1})
    meta = read_meta(writer.path)
    assert meta["args"] == ARGS | {"savedir": str(tmp_path), "clip_ratio": "inf"}
    assert (meta["xpid"], meta["ranks"], meta["resumed"]) == ("run", 1, [])
    assert (meta["successful"], meta["date_end"]) == (False, None)
    writer.close(exit_status=0, last_step=30)
    ended = read_meta(writer.path)
    assert (ended["successful"], ended["last_step"]) == (True, 30)
    assert meta["date_start"] <= ended["date_end"]
    assert "swordfish" not in (writer.path / "meta.json").read_text()


def test_meta_of_a_run_with_several_starts(started):
    """Also one that was killed, and one that starts over."""
    savedir, first = started.parent, read_meta(started)
    old = FileWriter(savedir, "run", ARGS | {"seed": 4}, resume_step=90)
    old.close(exit_status=130, last_step=105)
    killed = FileWriter(savedir, "run", ARGS | {"seed": 5}, resume_step=105)
    killed._resources.close()  # without what close() would write
    killed.folder.close()
    meta = read_meta(started)
    assert (meta["date_start"], len(meta["resumed"])) == (first["date_start"], 2)
    assert (meta["args"]["seed"], meta["first_step"]) == (5, 105)
    assert meta["exit_status"] is meta["date_end"] is None
    FileWriter(savedir).close(exit_status=1, error="ValueError")
    meta = read_meta(started)
    assert (meta["args"], meta["resumed"]) == (ARGS, [])
    assert (meta["exit_status"], meta["error"]) == (1, "ValueError")
