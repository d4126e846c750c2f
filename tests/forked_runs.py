"""Runs that start at once: a program that has imported PyTorch forks into each of them.

    python -m forked_runs SOCKET

gets one request per message from the socket with this number, see runs.Forked. To
import PyTorch takes longer than most runs of the tests. For the same reason, the fork
server of a run, which starts its actors, is a process that was forked before the run
began, and not a new program.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence


def offer_fork_server() -> None:
    """Lets multiprocessing take a process that has PyTorch as its fork server."""
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        be_fork_server(its)
    its.close()
    start_program = multiprocessing.util.spawnv_passfds
    offered = [pid]

    def start(path: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
        if not (offered and "forkserver import main" in arguments[-1]):
            return start_program(path, arguments, passed)
        # What a new program would get.
        request = {
            "code": arguments[-1],
            "numbers": list(passed),
            "variables": dict(os.environ),
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        }
        with ours:
            socket.send_fds(ours, [b"!"], list(passed))
            ours.sendall(json.dumps(request).encode())
        return offered.pop()

    multiprocessing.util.spawnv_passfds = start


def be_fork_server(requests: socket.socket) -> None:
    """Waits for the request and serves; ends if the run ends without one."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    message, received, _, _ = socket.recv_fds(requests, 1, 16)
    signal.signal(signal.SIGINT, handler)
    if not message:
        os._exit(0)
    with requests.makefile() as file:
        request = json.load(file)
    # To numbers that nobody wants, then to those that the code names.
    numbers = request["numbers"]
    free = max(numbers + received) + 1
    for i, opened in enumerate(received):
        os.dup2(opened, free + i)
    for i, number in enumerate(numbers):
        os.dup2(free + i, number)
    kept = {0, 1, 2, *numbers}
    for opened in map(int, os.listdir("/proc/self/fd")):
        if opened not in kept:
            with contextlib.suppress(OSError):  # the folder itself
                os.close(opened)
    os.environ.clear()
    os.environ.update(request["variables"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    try:
        exec(request["code"], {"__name__": "__main__"})
    finally:
        os._exit(1)


def become(words: list[str], folder: str, variables: dict[str, str]) -> None:
    """Turns this process into `python WORDS`."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [folder, *variables["PYTHONPATH"].split(os.pathsep)]
    if os.path.isdir("/proc/self/fd"):
        offer_fork_server()
    if words[0] == "-m":
        sys.argv[1:] = words[2:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def keep(request: bytes, passed: list[int]) -> bool:
    """Forks into a run, waits for it and reports; True in the process of the run."""
    *standard, report = passed
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.write(report, f"{os.getpid()}\n".encode())
        for number, opened in enumerate(standard):
            os.dup2(opened, number)
        for opened in passed:
            os.close(opened)
        become(**json.loads(request))
        return True
    for opened in standard:
        os.close(opened)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    importlib.import_module("torch._dynamo")  # torch.optim imports it at its first use
    importlib.import_module("gymnasium")
    with contextlib.suppress(ImportError):
        importlib.import_module("seaborn")  # MinAtar imports it, for 2 s
    gc.freeze()  # else the garbage collector of each run copies all pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        request, passed, _, _ = socket.recv_fds(requests, 2**20, 8)
        if not request:
            break
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            keep(request, passed)
            break
        for opened in passed:
            os.close(opened)


if __name__ == "__main__":
    main()
