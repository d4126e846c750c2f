"""python -m torchbeast.plot: see tools/plot.py."""

if __name__ == "__main__":
    from torchbeast.tools.plot import main

    main()
