"""Lets no test be skipped unnoticed: a plugin of pytest, which conftest.py loads.

If the variable TORCHBEAST_EXPECTED_SKIPS names a file such as expected_skips.txt, a
skip that the file does not list makes the tests fail.
"""

import fnmatch
import os
from pathlib import Path

import pytest

UNEXPECTED_SKIPS = 7  # an exit status that pytest itself has not


def read_expected(text: str) -> list[str]:
    """The patterns of a file of expected skips; ValueError if a line has no reason."""
    patterns = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, _, reason = (word.strip() for word in line.partition("|"))
            if not reason:
                raise ValueError(f"{line!r} has no reason; write PATTERN | REASON")
            patterns.append(pattern)
    return patterns


class Skips:
    """Collects the skips that were not expected, of tests and of whole files."""

    def __init__(self, expected: list[str]) -> None:
        self.expected = expected
        self.unexpected: dict[str, str] = {}

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        # An expected failure (xfail) also counts as skipped, but was run.
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        if not any(fnmatch.fnmatchcase(report.nodeid, e) for e in self.expected):
            reason = report.longrepr
            self.unexpected[report.nodeid] = (
                reason[2] if isinstance(reason, tuple) else str(reason)
            )

    pytest_runtest_logreport = note
    pytest_collectreport = note

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        # Not TESTS_FAILED: scripts/test runs failed tests again, and skipped ones not.
        if self.unexpected and exitstatus in (0, 1, 5):
            session.exitstatus = UNEXPECTED_SKIPS

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        for nodeid, reason in self.unexpected.items():
            terminalreporter.write_line(
                f"UNEXPECTED SKIP {nodeid}: {reason}", red=True, bold=True
            )


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("TORCHBEAST_EXPECTED_SKIPS")
    is_worker = hasattr(config, "workerinput")  # of xdist: it reports to the first one
    if path and not is_worker:
        try:
            expected = read_expected(Path(config.rootpath, path).read_text())
        except (OSError, ValueError) as error:
            raise pytest.UsageError(f"TORCHBEAST_EXPECTED_SKIPS: {error}") from None
        config.pluginmanager.register(Skips(expected))
