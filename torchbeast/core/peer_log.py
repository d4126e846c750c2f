"""What PolyBeast's learner says about what happens to its streams."""

import logging
import time

LINES, SECONDS = 10, 10.0  # so many lines in so many seconds, then only a number

# Kinds of libtorchbeast's events.
MESSAGES = {
    "lost": "A stream is lost: %s",
    "returned": "A stream is back: %s",
    "refused": "A stream is refused: %s",
    "env_error": "An environment raised, which costs its stream: %s",
}

# Of pools and listeners: (time, kind, text) each, and the number of those forgotten.
Events = tuple[list[tuple[float, str, str]], int]


class PeerLog:
    """Logs what happens to streams, a few lines at a time, and each only once."""

    def __init__(self, log: logging.Logger) -> None:
        self.log = log
        self.began = time.monotonic()  # the time in which lines are counted
        self.logged: set[str] = set()  # since then
        self.more = 0  # that were not logged

    def report(self, events: Events) -> None:
        if time.monotonic() - self.began > SECONDS:
            self.close()
            self.began, self.logged = time.monotonic(), set()
        happened, forgotten = events
        self.more += forgotten
        for _, kind, text in happened:
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
        """Logs how many more there were."""
        if self.more:
            self.log.warning("And %d more messages about streams.", self.more)
        self.more = 0
