"""python -m torchbeast.polybeast: see start.py."""

if __name__ == "__main__":
    import sys

    from torchbeast.polybeast.native import require_native
    from torchbeast.procs import processes

    processes.exit_on_stop_signals()  # the learner's imports take seconds
    require_native()
    from torchbeast.polybeast.start import main

    sys.exit(main())
