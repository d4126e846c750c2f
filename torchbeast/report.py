"""python -m torchbeast.report: see tools/report.py."""

from torchbeast.procs import processes

if __name__ == "__main__":
    from torchbeast.tools.report import main

    processes.run_script(main)
