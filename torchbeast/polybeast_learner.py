"""python -m torchbeast.polybeast_learner: see polybeast/learner.py."""

if __name__ == "__main__":
    import sys

    from torchbeast.polybeast.native import require_native
    from torchbeast.procs import processes

    processes.exit_on_stop_signals()  # the imports below take seconds
    require_native()
    from torchbeast.polybeast.learner import main

    sys.exit(main())
