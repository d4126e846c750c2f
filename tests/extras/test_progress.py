"""The live line, on a real terminal and without one."""

import contextlib
import fcntl
import logging
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
import types

import pytest
import runs
from gymnasium import spaces
from nets import ACTION_SPACES, make_net
from tqdm import tqdm

from torchbeast.extras import progress


@pytest.mark.parametrize("module", ["torchbeast.monobeast", "torchbeast.polybeast"])
def test_until_the_first_update_it_shows_the_actors_steps(tmp_path, module):
    # One unroll takes far longer than this test.
    flags = {**runs.SMALL, "unroll_length": 50_000, "total_steps": 10**9}
    if module.endswith("polybeast"):
        flags |= {"batch_size": 3, "num_servers": 1}
    terminal, inside = pty.openpty()
    size = struct.pack("HHHH", 40, 80, 0, 0)  # rows and columns
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
    run = subprocess.Popen(
        runs.command(tmp_path, "a", module, **flags),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=inside,
        env=runs.environment(),
        start_new_session=True,
    )
    os.close(inside)
    text = ""
    try:
        deadline = time.monotonic() + runs.patience(100)
        shown: set[int] = set()
        while len(shown - {0}) < 3:
            assert time.monotonic() < deadline, text
            if select.select([terminal], [], [], 1.0)[0]:
                text += os.read(terminal, 65536).decode(errors="replace")
            found = re.findall(r"actors' steps ([\d,]+) ", text)
            shown = {int(x.replace(",", "")) for x in found}
        assert not (tmp_path / "a" / "logs.csv").read_text(), "an update came first"
        run.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO: all have closed it
            while os.read(terminal, 65536):
                pass
        assert run.wait(60) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        os.close(terminal)


@pytest.mark.parametrize("quiet", [None, True])
def test_the_log_is_whole_beside_a_terminal(tmp_path, quiet):
    terminal, inside = pty.openpty()
    words = runs.command(tmp_path, "a", **runs.SMALL, suppress_logs=quiet)
    run = subprocess.Popen(words, stdout=inside, stderr=inside, env=runs.environment())
    os.close(inside)
    text = b""
    with contextlib.suppress(OSError):  # EIO: all have closed it
        while part := os.read(terminal, 65536):
            text += part
    os.close(terminal)
    assert run.wait(60) == 0
    next_commands = re.findall(r"^  .* -m torchbeast.*$", text.decode(), re.MULTILINE)
    assert len(next_commands) == (0 if quiet else 3)
    assert all(f"--savedir {tmp_path}" in x for x in next_commands)
    log = (tmp_path / "a" / "out.log").read_text()
    for words in ("New run a", "Saved ", "Finished at step 600"):
        assert words in log
        assert (words.encode() in text) == (not quiet)


def test_without_a_terminal(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "STATUS_SECONDS", 0.0)
    flags = types.SimpleNamespace(total_steps=1000, episodes_for_avg=100)
    counters = types.SimpleNamespace(games=3)
    counters.sps, counters.mean_return = (lambda: None), (lambda games: 2.5)
    learner = types.SimpleNamespace(step=40, counters=counters)
    line = progress.Progress(types.SimpleNamespace(flags=flags, learner=learner))
    line.show(0, 1234, None)
    assert "of 1,000, actors' steps 1,234, waiting for an update" in caplog.text
    caplog.clear()
    learner.step, counters.sps = 60, lambda: 50.0
    line.row({"policy_lag": 1.54})
    line.show(4, 2345, "3/4")
    assert "Step 60 of 1,000, SPS 50, return 2.50, games 3, lag 1.5" in caplog.text
    assert "queued 4, streams 3/4, 0:00:18 left" in caplog.text
    assert "2,345" not in caplog.text
    flags.total_steps = 10**18
    line.show(4, 2345, None)
    assert "Step 60 of 1,000,000,000,000,000,000" in caplog.text
    flags.total_steps = 123_000_000
    line.bar = tqdm(total=1, disable=True)  # the live line
    line.bar.set_description_str = lambda text: texts.append(text)
    learner.step, counters.sps = 77_000_000, lambda: 54_321.0
    counters.mean_return, texts = (lambda games: -14723.25), []
    for streams, last in (None, ", queued 128"), ("15/16", ", streams 15/16"):
        line.last = 0.0
        line.show(128, 2345, streams)
        assert texts[-1].endswith(last)
        assert len(texts[-1]) < 80, texts[-1]


def test_a_warning_if_nothing_is_learned(caplog):
    line = progress.Progress(types.SimpleNamespace(flags=None, learner=None))
    filling, learned, empty = {"step": 1}, [{"ess": 0.0}], {"ess": None}
    for row in [empty] * 9 + learned + [empty] * 9 + [filling]:
        line.row(row)
    for times, warnings in (9, 0), (1, 1), (99 - 10, 1), (1, 2):
        for _ in range(times):
            line.row(empty)
        assert caplog.text.count("batches without a step that counts.") == warnings


def test_the_log_says_which_encoder_each_observation_gets(caplog):
    caplog.set_level("INFO")
    image = spaces.Box(0, 1, (8, 8, 11), bool)
    space = spaces.Dict({"a": image, "c": spaces.Discrete(6)})
    net = make_net(space, ACTION_SPACES["discrete"])
    progress.log_encoders(net, "shallow")
    net.is_image = []  # as with --encoder
    progress.log_encoders(net, "shallow", "my_net:Mine")
    count = sum(x.numel() for x in net.parameters())
    assert caplog.messages == [
        "The model: observation['a']: (8, 8, 11) → shallow; "
        f"observation['c']: Discrete(6) → MLP; {count:,} weights.",
        f"The model: my_net:Mine; {count:,} weights.",
    ]
