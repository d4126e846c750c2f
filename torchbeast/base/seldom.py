"""For log lines that would repeat."""

import math
import time


class Seldom:
    """A call returns whether to log: True at most once per key in so many seconds.

    Args:
      seconds: infinite: once per key.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self._logged: dict[str, float] = {}  # key: time

    def __call__(self, key: str = "") -> bool:
        now = time.monotonic()
        is_due = now - self._logged.get(key, -math.inf) >= self.seconds
        if is_due or key not in self._logged:
            self._logged[key] = now
            return True
        return False
