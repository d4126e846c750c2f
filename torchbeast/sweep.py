"""python -m torchbeast.sweep: see tools/sweep.py."""

from torchbeast.procs import processes

if __name__ == "__main__":
    from torchbeast.tools.sweep import main

    processes.run_script(main)
