"""Measures how fast steps pass through libtorchbeast, compared to a bare gRPC stream.

    python benchmarks/transport.py
    python benchmarks/transport.py --streams 2 --envs 8 --sockets unix --repeat 5

Each cell measures the bare stream and libtorchbeast in turn, --repeat times:

- bare: the program bare_stream (libtorchbeast/benchmarks), built here with CMake. Per
  stream, one thread sends the bytes of an action and receives the bytes of a step. Each
  side copies them once. No environment, no batch, no Python.
- ours: one server process per stream, with E mock environments in Python that do
  nothing and whose observation is 84x84x4 uint8. On the learner's side: ActorPool,
  DynamicBatcher, and an inference thread in Python that always gives the same answer.
  Rollouts of 20 steps go to a BatchingQueue. A learner thread in Python takes batches
  of 8 rollouts, or of E if E is larger.

A step is one step of one environment. The table has medians over the repetitions;
"share" is ours / bare. CPU time is user and system time of all threads of a side. A
page fault is memory that the system hands out: a heap that shrinks and grows causes
them. Copied bytes are the counts of each part, divided by the steps. Needs Linux, and a
machine that does nothing else.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

import libtorchbeast

ROOT = Path(__file__).resolve().parent.parent
FRAME = (84, 84, 4)
NUM_ACTIONS = 6
UNROLL_LENGTH = 20
BATCH_SIZE = 8  # rollouts
WARM_UP_SECONDS = 1.0


# --- Ours -----------------------------------------------------------------------------


class MockEnvironments:
    """E environments with rows prepared in advance."""

    observation_space = spaces.Box(0, 255, FRAME, np.uint8)
    action_space = spaces.Discrete(NUM_ACTIONS)
    final_observation = None

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.rows = [
            {
                "observation": np.full((num_envs, *FRAME), step, np.uint8),
                "reward": np.zeros(num_envs, np.float32),
                "done": np.full(num_envs, step == 0),
                "episode_step": np.full(num_envs, step, np.int64),
                "episode_return": np.zeros(num_envs, np.float32),
            }
            for step in range(4)
        ]
        self.step_count = 0

    def initial(self) -> dict[str, np.ndarray]:
        return self.rows[0]

    def step(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        self.step_count += 1
        return self.rows[self.step_count % len(self.rows)]


def serve(address: str, num_envs: int, pipe: Connection) -> None:
    server = libtorchbeast.Server(lambda: MockEnvironments(num_envs), address)
    server.start()
    pipe.send(server.address)
    while pipe.recv() == "stats":
        used = {"cpu_seconds": cpu_seconds(), "faults": page_faults()}
        pipe.send({**server.stats(), **used})
    server.stop()


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def page_faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


def measure_ours(
    socket: str, streams: int, envs: int, seconds: float, directory: str
) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    servers, pipes = [], []
    for i in range(streams):
        address = f"unix:{directory}/ours.{i}" if socket == "unix" else "127.0.0.1:0"
        pipe, theirs = context.Pipe()
        server = context.Process(
            target=serve, args=(address, envs, theirs), daemon=True
        )
        server.start()
        theirs.close()
        servers.append(server)
        pipes.append(pipe)
    addresses = [pipe.recv() for pipe in pipes]

    batch_size = max(BATCH_SIZE, envs)
    queue = libtorchbeast.BatchingQueue(
        minimum_batch_size=batch_size,
        maximum_batch_size=batch_size,
        maximum_queue_size=batch_size,
    )
    batcher = libtorchbeast.DynamicBatcher(maximum_batch_size=streams * envs)
    pool = libtorchbeast.ActorPool(UNROLL_LENGTH, queue, batcher, addresses, ())
    answers = {
        n: (
            (
                np.zeros((1, n), np.int64),
                np.zeros((1, n, NUM_ACTIONS), np.float32),
                np.zeros((1, n), np.float32),
            ),
            (),
        )
        for n in range(envs, streams * envs + 1, envs)
    }

    def infer() -> None:
        for batch in batcher:
            (_, reward, *_), _ = batch.get_inputs()
            batch.set_outputs(answers[reward.shape[1]])

    def learn() -> None:
        for _ in queue:
            pass

    # Daemons, so that an error in this thread ends the program.
    threads = [
        threading.Thread(target=f, daemon=True) for f in (infer, learn, pool.run)
    ]
    for thread in threads:
        thread.start()

    def counters() -> dict[str, float]:
        for pipe in pipes:
            pipe.send("stats")
        sides = [pipe.recv() for pipe in pipes]
        batching = batcher.stats()
        stats = pool.stats()
        return {
            "steps": stats["num_steps"],
            "seconds": time.monotonic(),
            "client_cpu": cpu_seconds(),
            "server_cpu": sum(side["cpu_seconds"] for side in sides),
            "client_faults": page_faults(),
            "server_faults": sum(side["faults"] for side in sides),
            "server_copied": sum(side["bytes_copied"] for side in sides),
            "pool_copied": stats["bytes_copied"],
            "batcher_copied": batching["bytes_copied"],
            "queue_copied": queue.stats()["bytes_copied"],
            "batches": batching["num_batches"],
        }

    while pool.stats()["num_connected"] < streams:
        if not threads[2].is_alive():
            raise SystemExit("the actor pool ended early; see the error above")
        time.sleep(0.01)
    time.sleep(WARM_UP_SECONDS)
    before = counters()
    time.sleep(seconds)
    after = counters()
    num_threads = len(os.listdir("/proc/self/task"))
    pool.close()
    batcher.close()
    queue.close()
    for thread in threads:
        thread.join()
    for pipe, server in zip(pipes, servers, strict=True):
        pipe.send("stop")
        server.join()

    difference = {name: after[name] - before[name] for name in before}
    steps = difference["steps"]
    result = {
        "steps_per_second": steps / difference["seconds"],
        "client_cpu_us": 1e6 * difference["client_cpu"] / steps,
        "server_cpu_us": 1e6 * difference["server_cpu"] / steps,
        "client_faults": difference["client_faults"] / steps,
        "server_faults": difference["server_faults"] / steps,
        "mean_inference_batch": steps / difference["batches"],
        "client_threads": num_threads,
    }
    for part in ("server", "pool", "batcher", "queue"):
        result[f"{part}_copied_bytes"] = difference[f"{part}_copied"] / steps
    return result


# --- Bare -----------------------------------------------------------------------------


def build_bare_stream() -> Path:
    build = ROOT / "build" / "benchmarks"
    configure = ["cmake", "-S", ROOT, "-B", build, "-DTORCHBEAST_PYTHON=OFF"]
    compile_it = ["cmake", "--build", build, "--parallel", "--target", "bare_stream"]
    for command in (configure, compile_it):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(
                f"building bare_stream failed:\n{done.stdout}{done.stderr}"
            )
    return build / "bare_stream"


def measure_bare(
    program: Path, socket: str, streams: int, envs: int, seconds: float, directory: str
) -> dict[str, float]:
    if socket == "unix":
        address = f"unix:{directory}/bare"
    else:
        address = f"127.0.0.1:{free_port()}"
    # The same bytes as ours: observation, reward, done, episode_step, episode_return.
    num_bytes = envs * (int(np.prod(FRAME)) + 4 + 1 + 8 + 4)
    arguments = [address, streams, num_bytes, 8 * envs, seconds]
    done = subprocess.run(
        [str(program), *map(str, arguments)], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"bare_stream failed: {done.stderr}")
    result = json.loads(done.stdout)
    steps = envs * result["round_trips"]
    return {
        "steps_per_second": steps / result["seconds"],
        "client_cpu_us": 1e6 * result["client_cpu_seconds"] / steps,
        "server_cpu_us": 1e6
        * result["server_cpu_seconds"]
        / (envs * result["all_round_trips"]),
    }


def free_port() -> int:
    import socket as sockets

    with sockets.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# --- The table ------------------------------------------------------------------------


def medians(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in results) for name in results[0]}


def hardware() -> str:
    text = Path("/proc/cpuinfo").read_text()
    match = re.search(r"model name\s*: (.*)", text)
    return f"{match.group(1) if match else 'unknown CPU'}, {os.cpu_count()} cores"


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--envs", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument(
        "--sockets", nargs="+", choices=["unix", "tcp"], default=["unix", "tcp"]
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds per measurement"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="how often to measure both, in turn"
    )
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    flags = parser.parse_args(argv)

    program = build_bare_stream()
    print(f"{hardware()}; commit {commit()}\n")
    print(
        "| socket | streams × environments | bare, steps/s | **ours, steps/s** "
        "| share | CPU µs per step: learner, servers | bare "
        "| page faults per step: learner, servers | mean inference batch "
        "| the learner's threads "
        "| bytes copied per step: server, pool, batcher, queue |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    everything: list[dict[str, Any]] = []
    for socket in flags.sockets:
        for envs in flags.envs:
            for streams in flags.streams:
                bare, ours = [], []
                with tempfile.TemporaryDirectory() as directory:
                    where = (socket, streams, envs, flags.seconds, directory)
                    for _ in range(flags.repeat):
                        bare.append(measure_bare(program, *where))
                        ours.append(measure_ours(*where))
                a, b = medians(bare), medians(ours)
                shares = [
                    y["steps_per_second"] / x["steps_per_second"]
                    for x, y in zip(bare, ours, strict=True)
                ]
                copied = ", ".join(
                    f"{b[f'{part}_copied_bytes']:,.0f}"
                    for part in ("server", "pool", "batcher", "queue")
                )
                print(
                    f"| {socket} | {streams} × {envs} | {a['steps_per_second']:,.0f} "
                    f"| **{b['steps_per_second']:,.0f}** "
                    f"| {statistics.median(shares):.0%} "
                    f"| {b['client_cpu_us']:.1f}, {b['server_cpu_us']:.1f} "
                    f"| {a['client_cpu_us']:.1f}, {a['server_cpu_us']:.1f} "
                    f"| {b['client_faults']:.2f}, {b['server_faults']:.2f} "
                    f"| {b['mean_inference_batch']:.1f} "
                    f"| {b['client_threads']:.0f} | {copied} |",
                    flush=True,
                )
                cell = {"socket": socket, "streams": streams, "envs": envs}
                everything.append({**cell, "bare": bare, "ours": ours})
    if flags.json:
        flags.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
