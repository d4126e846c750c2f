"""Runs that start at once: a program that has imported PyTorch forks into each of them.

    python -m forked_runs

reads one request per line, as JSON, and writes two lines for each: the process id, and
the exit status when the run has ended. To import PyTorch takes longer than most runs of
the tests.
"""

import gc
import importlib
import json
import os
import runpy
import sys


def become(
    module: str, words: list[str], folder: str, variables: dict[str, str], output: str
) -> None:
    """Turns this process into `python -m module words`, in a session of its own."""
    os.setsid()
    # First of all, because the test waits for the output to be opened and closed.
    with open(os.devnull) as nothing, open(output, "w") as file:
        for number, opened in enumerate((nothing, file, file)):
            os.dup2(opened.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[1:] = words
    sys.path[:0] = [folder, *variables["PYTHONPATH"].split(os.pathsep)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    importlib.import_module("torch._dynamo")  # torch.optim imports it at its first use
    gc.freeze()  # else the garbage collector of each run copies all pages
    while line := sys.stdin.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(**request)
            break
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
