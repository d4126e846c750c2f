"""--wandb: real runs without a network."""

import json
import os
import signal
import struct
import subprocess

import pytest
import runs

BLOCK = 32768


def records(data):
    """The messages of a .wandb file, which is a log in LevelDB's format."""
    position, message = 7, b""  # after the file's header
    while position < len(data):
        left = BLOCK - position % BLOCK
        if left < 7:  # too short for a header
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        message += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield message
            message = b""


def history(folder):
    """The rows that offline runs have written: [(id of the run, {column: value})]."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(path.read_bytes()):
            record = messages.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                found.append((path.stem, row))
    return found


@pytest.mark.parametrize("module", ["torchbeast.monobeast", "torchbeast.polybeast"])
def test_weights_and_biases_of_a_resumed_run(tmp_path, monkeypatch, module):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = {**runs.SMALL, "module": module, "batch_size": 3, "wandb": "project"}
    runs.run(tmp_path, "a", **flags)
    runs.run(tmp_path, "a", module=module, total_steps=900)
    rows, found = runs.read_logs(tmp_path, "a"), history(tmp_path / "a")
    assert len({run for run, _ in found}) == 1, "one run"
    assert int(rows[-1]["step"]) == 900
    assert [row["step"] for _, row in found] == [int(row["step"]) for row in rows]
    for (_, seen), row in zip(found, rows, strict=True):
        assert seen["total_loss"] == pytest.approx(float(row["total_loss"]))
        assert ("mean_game_return" in seen) == bool(row["mean_game_return"])
    if module.endswith("monobeast"):
        pytest.importorskip("pygame")  # CartPole draws with it
        flags = {"mode": "test", "num_test_episodes": 1, "video": tmp_path / "a.mp4"}
        runs.run(tmp_path, "a", **flags)
        (sent,) = (tmp_path / "a" / "wandb").rglob("media/videos/*.mp4")
        assert sent.read_bytes() == (tmp_path / "a.mp4").read_bytes()
        ((_, row),) = history(tmp_path / "a")[len(found) :]
        assert row["step"] == 900


def test_the_service_of_weights_and_biases_is_killed(tmp_path, monkeypatch):
    """The run goes on, and says so once."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    process = runs.start(
        tmp_path, "a", **runs.SMALL | {"total_steps": 10**9}, wandb="p"
    )
    runs.wait_for_rows(process, tmp_path, "a", 10, timeout=200)
    services = []
    everyone = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True
    ).stdout
    for line in everyone.splitlines():
        pid, parent, command = line.split(maxsplit=2)
        if int(parent) == process.pid and "wandb" in command:
            services.append(int(pid))
    assert services
    for pid in services:
        os.kill(pid, signal.SIGKILL)
    rows = len(runs.read_logs(tmp_path, "a"))
    runs.wait_for_rows(process, tmp_path, "a", rows + 300, timeout=200)
    os.kill(process.pid, signal.SIGINT)
    output = runs.finish(process, 150)
    assert process.returncode == 130, output
    assert output.count("Weights & Biases") == 1
    assert "Saved" in output
    assert "Traceback" not in output
