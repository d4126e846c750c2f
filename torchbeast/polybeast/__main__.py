"""python -m torchbeast.polybeast: see start.py."""

from torchbeast.procs import processes

if __name__ == "__main__":
    processes.exit_on_stop_signals()  # the learner's imports take seconds
    processes.require_native()
    from torchbeast.polybeast.start import main

    processes.run_script(main)
