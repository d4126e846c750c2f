"""python -m torchbeast.sweep: see tools/sweep.py."""

if __name__ == "__main__":
    import sys

    from torchbeast.tools.sweep import main

    sys.exit(main())
