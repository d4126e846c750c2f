"""python -m torchbeast.plot: see tools/plot.py."""

from torchbeast.procs import processes

if __name__ == "__main__":
    from torchbeast.tools.plot import main

    processes.run_script(main)
