"""Log messages of PolyBeast's learner about its streams."""

import logging
import re
import time
from collections import Counter

# At most so many lines per SECONDS, of one peer and of all; others are only counted.
LINES, ALL_LINES, SECONDS = 10, 100, 10.0
TABLE_SECONDS = 600.0  # between two tables of refused peers
ROWS, MAX_PEERS = 20, 1000  # of a table, and peers that are counted apart
REASON_SIZE = 300  # characters of a reason in a table

# By kind of libtorchbeast's events.
MESSAGES = {
    "lost": "A stream is lost: %s",
    "returned": "A stream is back: %s",
    "refused": "A stream is refused: %s",
    "env_error": "An environment raised, so its stream starts again: %s",
}

# The first peer that a text names is the one that it is about. The port of one that has
# connected differs each time.
PEER = re.compile(
    r"joined from (?:ipv[46]:(?P<host>\S+):\d+|(?P<here>this machine)[^)]*\))"
    r"|environment server at (?P<server>\S*[^\s:,;])"
)

# (time, kind, text) of each event of a pool or listener, and the number of lost ones.
Events = tuple[list[tuple[float, str, str]], int]


class PeerLog:
    """Logs events of streams, without repetitions and at a limited rate.

    The texts come from libtorchbeast, which escapes what peers say.
    """

    def __init__(self, log: logging.Logger) -> None:
        self.log = log
        self.began = time.monotonic()  # start of the current interval
        self.logged: set[str] = set()  # in this interval
        self.lines: Counter[str] = Counter()  # by peer, in this interval
        self.more = 0  # not logged in this interval
        self.refused: Counter[str] = Counter()  # by peer, since the start
        self.reasons: dict[str, str] = {}  # the last of each
        self.tabled = (self.began, 0)  # time and number of refusals of the last table

    def report(self, events: Events) -> None:
        now = time.monotonic()
        if now - self.began > SECONDS:
            self._count_more()
            self.began, self.logged, self.lines = now, set(), Counter()
        if now - self.tabled[0] > TABLE_SECONDS:
            self._log_table()
        recent, num_lost = events
        self.more += num_lost
        for _, kind, text in recent:
            peer, reason = split(text)
            if kind == "refused":
                if len(self.refused) >= MAX_PEERS and peer not in self.refused:
                    peer = "others"
                self.refused[peer] += 1
                self.reasons[peer] = reason
            message = MESSAGES[kind] % text
            is_full = self.lines[peer] >= LINES or len(self.logged) >= ALL_LINES
            if is_full or message in self.logged:
                self.more += 1
                continue
            self.logged.add(message)
            self.lines[peer] += 1
            level = logging.INFO if kind == "returned" else logging.WARNING
            self.log.log(level, "%s", message)

    def close(self) -> None:
        """Logs the number of suppressed messages, and who was refused."""
        self._count_more()
        self._log_table()

    def _count_more(self) -> None:
        if self.more:
            self.log.warning("And %d more messages about streams.", self.more)
        self.more = 0

    def _log_table(self) -> None:
        total = self.refused.total()
        if total > self.tabled[1]:
            rows = [
                f"  {peer}: {count:,}, the last because: {self.reasons[peer]}"
                for peer, count in self.refused.most_common(ROWS)
            ]
            if len(self.refused) > ROWS:
                rows.append(f"  and {len(self.refused) - ROWS} more peers")
            self.log.warning("Refused streams by peer:\n%s", "\n".join(rows))
        self.tabled = (time.monotonic(), total)


def split(text: str) -> tuple[str, str]:
    """The peer that an event is about, and the first line of what happened."""
    found = PEER.search(text)
    if not found:
        return "others", text.partition("\n")[0][:REASON_SIZE]
    peer = found["here"] or found["server"] or found["host"].replace("%5B", "[")
    reason = text[found.end() :].lstrip(": ").partition("\n")[0]
    return peer.replace("%5D", "]"), reason[:REASON_SIZE]
