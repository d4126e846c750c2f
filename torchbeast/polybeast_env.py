"""python -m torchbeast.polybeast_env: see polybeast/env.py."""

if __name__ == "__main__":
    import sys

    from torchbeast.procs import processes

    processes.exit_on_stop_signals()  # the imports below take a moment
    from torchbeast.polybeast.env import main

    sys.exit(main())
