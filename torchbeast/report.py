"""python -m torchbeast.report: see tools/report.py."""

if __name__ == "__main__":
    from torchbeast.tools.report import main

    main()
