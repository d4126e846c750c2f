"""python -m torchbeast.polybeast_learner: see polybeast/learner.py."""

from torchbeast.procs import processes

if __name__ == "__main__":
    processes.exit_on_stop_signals()  # the imports below take seconds
    processes.require_native()
    from torchbeast.polybeast.learner import main

    processes.run_script(main)
