"""python -m torchbeast.polybeast_env: see polybeast/env.py."""

from torchbeast.procs import processes

if __name__ == "__main__":
    processes.exit_on_stop_signals()  # the imports below take a moment
    from torchbeast.polybeast.env import main

    processes.run_script(main)
