"""What --record costs, and whether torchbeast.tools.repeat gives the same run again.

    python benchmarks/record.py equal --runs 10
    python benchmarks/record.py cost --env PongNoFrameskip-v4 --seconds 60
    python benchmarks/record.py cost --script polybeast --flags "--preset minatar"

`equal` starts asynchronous runs, kills each one in the middle (SIGKILL), resumes it,
repeats it and compares all columns of logs.csv but those of time. `cost` compares the
steps per second of runs without and with --record, in turn: A B A B. Beside other work
only the CPU time says something.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from cpu_time import process_tree
from equal_logs import read_rows

COMMON = "--precision fp32 --torch_threads 1 --checkpoint_interval 1 --record"
LAYOUT = "--num_actors 3 --envs_per_actor 3 --batch_size 4 --unroll_length 5"
CASES = {
    "lstm": f"{LAYOUT} --env CartPole-v1 --use_lstm --total_steps 8000",
    "laser": f"{LAYOUT} --env CartPole-v1 --use_lstm --rollouts episode "
    "--replay_ratio 1 --replay_size 2000 --learn_start 500 --save_replay "
    "--total_steps 8000",
    "threads": f"{LAYOUT} --env CartPole-v1 --num_learner_threads 3 --minibatches 2 "
    "--updates_per_batch 4 --normalize_observations --total_steps 6000",
    "minatar": "--preset minatar --env MinAtar/Breakout-v1 --total_steps 60000",
    "ppo": f"{LAYOUT} --env Pendulum-v1 --clip_ratio 0.2 --optimizer adam "
    "--updates_per_batch 2 --total_steps 8000",
}


def start(
    savedir: str, xpid: str, flags: str, script: str = "monobeast"
) -> subprocess.Popen:
    words = [sys.executable, "-m", f"torchbeast.{script}", *flags.split()]
    return subprocess.Popen(
        [*words, "--savedir", savedir, "--xpid", xpid],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    _, errors = process.communicate(timeout=1200)
    if process.returncode:
        sys.exit(f"{process.args} ended with {process.returncode}:\n{errors}")
    return errors


def equal(args: argparse.Namespace) -> int:
    """Prints one line per run; returns how many repetitions were not equal."""
    wrong = 0
    with tempfile.TemporaryDirectory() as savedir:
        for i in range(args.runs):
            name = list(CASES)[i % len(CASES)]
            xpid, flags = f"{name}-{i}", f"{CASES[name]} {COMMON}"
            process = start(savedir, xpid, flags)
            model = pathlib.Path(savedir, xpid, "model.tar")
            while not model.exists() and process.poll() is None:
                time.sleep(0.1)
            time.sleep(2)
            process.send_signal(signal.SIGKILL)
            process.wait()
            finish(start(savedir, xpid, flags))
            finish(start(savedir, f"{xpid}-again", xpid, "tools.repeat"))
            then, now = read_rows(savedir, xpid), read_rows(savedir, f"{xpid}-again")
            wrong += then != now
            records = sorted(model.parent.glob("record.*"))
            before = pathlib.Path(savedir, f"{name}-{i - len(CASES)}", "record.0")
            other = before.exists() and events(before) != events(records[0])
            print(
                f"{xpid}: {'equal' if then == now else 'DIFFERENT'}, {len(then)} rows, "
                f"{len(records)} starts"
                + (", another order than the run before" if other else ""),
                flush=True,
            )
    print(f"{args.runs - wrong} of {args.runs} equal")
    return wrong


def events(record: pathlib.Path) -> bytes:
    return record.read_bytes().partition(b"\n")[2][:1200]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all below it that live."""
    return sum(process_tree(pid).values())


def cost(args: argparse.Namespace) -> int:
    """Prints the steps per second of each run, after a warm-up."""
    flags = (
        f"--env {args.env} --total_steps 1000000000 --disable_checkpoint "
        f"--precision fp32 {args.flags}"
    )
    with tempfile.TemporaryDirectory() as savedir:
        for i, more in enumerate(["", "--record", "", "--record"]):
            process = start(savedir, str(i), f"{flags} {more}", args.script)
            logs = pathlib.Path(savedir, str(i), "logs.csv")
            while not logs.exists() or logs.read_text().count("\n") < 20:
                if process.poll() is not None:
                    sys.exit(f"the run has ended: {process.communicate()[1]}")
                time.sleep(0.1)
            time.sleep(args.warm_up)
            used = cpu_seconds(process.pid)
            begun, first = time.monotonic(), int(read_rows(savedir, str(i))[-1]["step"])
            time.sleep(args.seconds)
            step, ended = int(read_rows(savedir, str(i))[-1]["step"]), time.monotonic()
            used = cpu_seconds(process.pid) - used
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
            line = f"{more or 'without':9} {(step - first) / (ended - begun):8.1f} SPS"
            line += f", {1000 * used / (step - first):.3f} ms of CPU per step"
            if more:
                size = os.path.getsize(pathlib.Path(savedir, str(i), "record.0"))
                line += f", {size / step * 10:.2f} MB per 10M steps"
            print(line, flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["equal", "cost"])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--env", default="MinAtar/Breakout-v1")
    parser.add_argument("--script", default="monobeast", help="of cost: polybeast")
    parser.add_argument("--flags", default="", help="more flags of the runs")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warm_up", type=float, default=5)
    args = parser.parse_args()
    return {"equal": equal, "cost": cost}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
