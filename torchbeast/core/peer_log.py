"""Log messages of PolyBeast's learner about its streams."""

import logging
import time

LINES, SECONDS = 10, 10.0  # at most LINES lines per SECONDS; others are only counted

# By kind of libtorchbeast's events.
MESSAGES = {
    "lost": "A stream is lost: %s",
    "returned": "A stream is back: %s",
    "refused": "A stream is refused: %s",
    "env_error": "An environment raised, so its stream starts again: %s",
}

# (time, kind, text) of each event of a pool or listener, and the number of lost ones.
Events = tuple[list[tuple[float, str, str]], int]


class PeerLog:
    """Logs events of streams, without repetitions and at a limited rate."""

    def __init__(self, log: logging.Logger) -> None:
        self.log = log
        self.began = time.monotonic()  # start of the current interval
        self.logged: set[str] = set()  # in this interval
        self.more = 0  # not logged in this interval

    def report(self, events: Events) -> None:
        if time.monotonic() - self.began > SECONDS:
            self.close()
            self.began, self.logged = time.monotonic(), set()
        recent, num_lost = events
        self.more += num_lost
        for _, kind, text in recent:
            if (
                len(self.logged) == LINES
                or (message := MESSAGES[kind] % text) in self.logged
            ):
                self.more += 1
                continue
            self.logged.add(message)
            level = logging.INFO if kind == "returned" else logging.WARNING
            self.log.log(level, "%s", message)

    def close(self) -> None:
        """Logs the number of suppressed messages."""
        if self.more:
            self.log.warning("And %d more messages about streams.", self.more)
        self.more = 0
