"""Faults end a run soon, with one message and a non-zero status, and leave nothing.

Every test starts a real run, waits until it works, brings a fault about, and then looks
at what is left: exit status, messages, processes, shared memory, run files.
"""

import contextlib
import functools
import os
import pathlib
import resource
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import runs
import torch
from watched_runs import (
    ACTOR_TIMEOUT,
    END_SECONDS,
    SHARED_MEMORY,
    Run,
    mount_namespace,
    processes_of_session,
    small_disk,
    starter,
    wait_until,
)


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., Run]]:
    """Starts runs, and kills what is left of them after the test."""
    yield from starter(functools.partial(Run, tmp_path))


def test_a_tmpdir_in_which_no_socket_fits(tmp_path, monkeypatch):
    """A socket's path has 107 bytes at most; multiprocessing puts sockets there."""
    folder = tmp_path / ("t" * 100)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    process = runs.start(tmp_path, "a", **runs.SMALL)
    assert "Finished" in runs.finish(process)


# --- Actors ---------------------------------------------------------------------------


def test_actor_is_killed(start):
    """The programs that its environments have started end, too."""
    run = start(env="faulty:WithProgram")
    run.wait_for_a_checkpoint()
    pid = run.actors()[1]
    os.kill(pid, signal.SIGKILL)
    run.wait_for_end(1)
    run.assert_error(f"actor 1 (pid {pid}) died by signal SIGKILL")
    run.assert_files()


def test_environment_hangs(start):
    run = start(actor_timeout=ACTOR_TIMEOUT)
    run.wait_for_a_checkpoint()
    run.cause("hang")
    run.wait_for_end(1, ACTOR_TIMEOUT + END_SECONDS)
    run.assert_error("made no step for 6 s")
    # The stack of the actor that hangs: from act() to the line that waits.
    assert "faulty.py" in run.console
    assert "in hang" in run.console
    assert "in run_actor" in run.console
    run.assert_files()


@pytest.mark.parametrize(
    ("env", "fault", "words"),
    [
        # What an actor's pipe would raise if the learner had exited.
        ("Environment", "lose_connection", "ConnectionResetError: the simulator"),
        # The error is known before close() is called, which never returns.
        ("HangsAfterAnError", "raise_error", "ValueError: the ball left the table"),
        ("Environment", "raise_a_long_error", "RuntimeError: x"),
    ],
)
def test_environment_raises(start, env, fault, words):
    run = start(env=f"faulty:{env}")
    run.wait_for_a_checkpoint()
    run.cause(fault)  # in both actors
    run.wait_for_end(1)
    run.assert_error(" failed:\n", words, tracebacks=1)
    assert f"in {fault}" in run.console
    assert len(run.console) < 100_000
    run.assert_files()


def test_fork_server_is_killed(start):
    """multiprocessing then reports all actors as dead, but they are alive."""
    run = start(env="faulty:WithProgram")
    run.wait_for_a_checkpoint()
    run.cause("hang")
    (server,) = run.fork_servers()
    os.kill(server, signal.SIGKILL)
    run.wait_for_end(1)
    run.assert_error("or the process that starts actors (fork server) died")
    run.assert_files()


def test_environment_is_never_made(start):
    """The time limit also applies to the environment that is made for its spaces."""
    run = start(env="faulty:SlowToMake", actor_timeout=1)
    run.wait_for_end(1, 3 * END_SECONDS)
    assert "Making one environment of faulty:SlowToMake" in run.console
    run.assert_error("that makes an environment of faulty:SlowToMake (pid ")
    assert "in hold_the_lock" in run.console, "where it hangs"
    assert not run.path.exists()


def test_environment_is_never_closed(start):
    run = start(env="faulty:SlowToClose", total_steps=600)
    run.wait_for_end(0, 3 * END_SECONDS)
    run.assert_no_error()


# --- Learner --------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
def test_loss_is_nan(start, normalize):
    run = start(normalize_observations=normalize or None)
    run.wait_for_a_checkpoint()
    run.cause("nan_observation")
    run.wait_for_end(1)
    run.assert_error(
        *("FloatingPointError: ", "'total_loss': nan", "'baseline_loss': nan"),
        "The cause is the environment: the observation is nan",
        tracebacks=1,
    )
    saved = run.assert_files()
    assert f"at step {saved['stats']['step']}:" in run.console


def test_a_reward_is_nan(start):
    run = start()
    run.wait_for_a_checkpoint()
    run.cause("nan_reward")
    run.wait_for_end(1)
    run.assert_error("faulty:Environment: step() returned the rewards [")
    run.assert_files()


def test_weights_are_nan(start):
    """Without a smoothed square and ε, a gradient of 0 is divided by 0."""
    run = start(alpha=0, epsilon=0, num_learner_threads=2)
    run.wait_for_end(1, 2 * END_SECONDS)
    run.assert_error(
        "the update at step 0 made weights that are not finite",
        *("--learning_rate (now 0.0007)", "--epsilon (now 0)"),
        tracebacks=1,
    )
    assert run.assert_files() == {}
    assert not run.checkpoint.exists()


def test_learner_thread_raises(start):
    run = start(faulty_learner=True, num_learner_threads=2)
    run.wait_for_a_checkpoint()
    run.cause("raise_in_loss")
    run.wait_for_end(1)
    run.assert_error(
        'raise ZeroDivisionError("no baseline to divide by")',
        "ZeroDivisionError: no baseline to divide by",
        tracebacks=1,
    )
    run.assert_files()


def test_learner_is_killed(start):
    """Nothing is left, even if the actors' threads can't run."""
    run = start(env="faulty:WithProgram")
    run.wait_for_a_checkpoint()
    before = torch.load(run.checkpoint, weights_only=True)
    run.cause("hold_the_lock")
    time.sleep(0.2)
    run.signal_group(signal.SIGKILL)
    run.process.wait()
    wait_until(lambda: not processes_of_session(run.pid), "no process left", 10.0)
    run.assert_nothing_left()
    run.assert_no_error()
    saved = torch.load(run.checkpoint, weights_only=True)
    assert saved["stats"]["step"] >= before["stats"]["step"]


# --- Signals --------------------------------------------------------------------------


def test_signal_saves_and_ends(start):
    """SIGINT ends a run, SIGTERM the resumed one, even if all processes get it."""
    first = start(checkpoint_interval=600)
    first.wait_for_updates(3)
    first.end()
    first.assert_no_error()
    assert first.console.count("SIGINT: ending the run.") == 1
    step = first.assert_files()["stats"]["step"]

    second = start(checkpoint_interval=600)
    second.wait_for_updates(3)
    assert f"Resuming at step {step}." in second.console
    second.signal_all(signal.SIGTERM)
    second.wait_for_end(143)
    second.assert_no_error()
    assert second.console.count("SIGTERM: ending the run.") == 1
    assert second.assert_files()["stats"]["step"] > step


def test_sigint_during_the_start(start):
    """During imports, while an environment is made, and while actors start."""
    run = start(fresh=True)
    run.wait_for(lambda: "libtorch_cpu" in run.maps(), "the import of torch")
    run.signal_group(signal.SIGINT)
    run.wait_for_end(130)
    assert run.console == ""

    run = start(fresh=True)
    run.wait_for(run.fork_servers, "the start of the fork server")
    run.signal_group(signal.SIGINT)
    run.wait_for_end(130)
    run.assert_no_error()
    assert run.console.count("SIGINT: exits without saving.") == 1
    assert not run.path.exists()

    run = start(fresh=True)
    run.wait_for((run.path / "meta.json").exists, "the start of the run")
    run.signal_group(signal.SIGINT)
    run.wait_for_end(130)
    run.assert_no_error()
    assert run.console.count("SIGINT: ending the run.") == 1
    run.assert_files()


def test_the_terminal_is_closed(start):
    """SIGHUP ends a run; a run that ignores it continues without its terminal."""
    run = start(terminal=True)
    ignore = ("sh", "-c", 'trap "" HUP && exec "$@"', "sh")
    deaf = start(xpid="deaf", prefix=ignore, terminal=True)
    for each in (run, deaf):
        each.wait_for_updates(3)
        each.wait_for(lambda x=each: "SPS" in x.console, "the status line")
        each.close_terminal()
    run.wait_for_end(129)
    assert "SIGHUP: ending the run." in (run.path / "out.log").read_text()
    run.assert_files()
    deaf.wait_for_updates(3)
    time.sleep(0.5)  # the status line was written to again
    deaf.end(signal.SIGTERM)
    assert "SIGTERM: ending the run." in (deaf.path / "out.log").read_text()
    deaf.assert_files()


def test_second_sigint_does_not_wait(start):
    run = start(faulty_learner=True)
    run.wait_for_a_checkpoint()
    run.hang_in_loss()
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "SIGINT: ending the run." in run.console, "an answer")
    run.process.send_signal(signal.SIGINT)  # at once, it counts as the same
    time.sleep(1.1)
    assert run.process.poll() is None
    run.end()
    run.assert_no_error()
    run.assert_files(saved_at_end=False)


def test_sigint_again_and_again(start):
    """Repeated signals don't prevent the checkpoint or change the exit status."""
    run = start(faulty_learner=True, checkpoint_interval=600)
    run.wait_for_updates(3)
    run.cause("save_slowly")
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: run.marks("saves"), "the learner to save")
    time.sleep(1.1)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    run.cause("nothing more")
    while run.process.poll() is None:
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.005)
    run.wait_for_end(130)
    run.assert_no_error()
    run.assert_files()


def test_sigint_while_the_learner_hangs(start):
    run = start(faulty_learner=True)
    run.wait_for_a_checkpoint()
    run.hang_in_loss()
    run.process.send_signal(signal.SIGINT)
    run.wait_for_end(1)  # 130 would say that all is saved
    run.assert_error("learner-0 did not stop in time")
    run.assert_files(saved_at_end=False)


# --- Disk and memory ------------------------------------------------------------------


def fill(disk: pathlib.Path, leave: int = 0) -> None:
    """Fills a disk, except for some bytes."""
    with (disk / "filler").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        file.truncate(file.tell() - leave)


@pytest.mark.parametrize("leave", [0.5, 0.0])
def test_disk_is_full(start, tmp_path, leave):
    """A real full disk if one can be mounted, else a limit on the size of files.

    leave: what part of a checkpoint still fits.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    if mount_namespace():
        run = start(savedir=disk, prefix=small_disk(disk, "4m"))
        run.savedir = run.see_small_disk(disk)
        run.wait_for_a_checkpoint()
        fill(run.savedir, leave=int(leave * run.checkpoint.stat().st_size))
    else:
        run = start(savedir=disk)
        run.wait_for_a_checkpoint()
        limit = int(max(leave, 0.1) * run.checkpoint.stat().st_size)
        resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (limit, limit))
    run.wait_for_end(1)
    if leave:
        run.assert_error("CheckpointError: Cannot save a checkpoint of")
    else:  # also what learns can't write then
        expected = ("No space left on device", "File too large")
        assert any(words in run.console for words in expected), run.console
        assert "Cannot write " in run.console or "Cannot save " in run.console
        assert "Traceback" not in run.console
        assert run.console.count("[ERROR ") == 1, run.console
    for name in ("meta.json", "logs.csv", "out.log", "model.tar"):
        assert (run.path / name).stat().st_size > 0, name
    run.assert_files(saved_at_end=False, has_end=bool(leave))


@pytest.mark.parametrize("limit", ["--fsize=20480", "--nofile=30"])
def test_a_limit_of_the_system_is_one_message(start, limit):
    run = start(prefix=["prlimit", limit])
    run.wait_for_end(1)
    assert run.console.count("[ERROR ") == 1, run.console
    assert "Traceback" not in run.console
    assert "File too large" in run.console or "Too many open files" in run.console


def test_shared_memory_is_too_small(start):
    """A small /dev/shm if one can be mounted, else buffers larger than the real one."""
    if mount_namespace():
        weights = start(xpid="a", prefix=small_disk(SHARED_MEMORY, "64k"))
        buffers = start(
            xpid="b", prefix=small_disk(SHARED_MEMORY, "1m"), num_buffers=10_000
        )
        weights.wait_for_end(1, 2 * END_SECONDS)
        weights.assert_error(
            *("SharedMemoryError", "Buffers need 0.4 MiB"),
            *("/dev/shm has 0.1 MiB", "--model"),
        )
        assert not weights.path.exists()
    else:
        buffers = start(num_buffers=10**9)
    buffers.wait_for_end(1, 2 * END_SECONDS)
    buffers.assert_error(
        *("SharedMemoryError", "Buffers need ", "/dev/shm has "), "--num_buffers"
    )
    assert not buffers.path.exists()


@pytest.mark.skipif(not mount_namespace(), reason="no right to mount a small /dev/shm")
def test_shared_memory_is_full_after_the_start(start):
    """A run allocates all its shared memory at the start, also for saving."""
    run = start(
        prefix=small_disk(SHARED_MEMORY, "16m"),
        sync=True,
        num_buffers=6,
        unroll_length=5,
        checkpoint_interval=600,
    )
    run.wait_for_updates()
    fill(run.see_small_disk(SHARED_MEMORY))
    run.wait_for_updates(10)
    run.end()
    run.assert_no_error()
    run.assert_files()


def test_stderr_is_closed(start):
    """The run continues, and no other file gets the descriptor of stderr."""
    run = start(prefix=("sh", "-c", 'exec "$@" 2>&-', "sh"), total_steps=1000)
    run.wait_for_end(0, 2 * END_SECONDS)
    assert run.console == ""
    assert "Finished at step 1000" in (run.path / "out.log").read_text()
    saved = torch.load(run.checkpoint, weights_only=True)
    assert saved["stats"]["step"] == 1000
