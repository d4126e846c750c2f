"""--metrics_port: a process answers Prometheus and probes, by HTTP.

/metrics   numbers in Prometheus' format
/livez     200 if the process lives, 503 if it should be started again
/readyz    200 if it does its work, 503 if not now
"""

import itertools
import re
import socketserver
import threading
import time
from collections.abc import Iterable
from typing import Any

from torchbeast.base.errors import needing, using
from torchbeast.base.flag import START, Group, Range, flag

PORT = Range(0, 65535, "at least 0 and at most 65535")
ROUND_SECONDS = 600.0  # least time in which the main loop goes round, while it lives
READY_SECONDS = 300.0  # greatest age of the last batch of a learner that is ready
REQUEST_SECONDS = 5.0  # for which a client may say nothing
MOST_THREADS = 256  # of the process; beyond it connections are closed
# These count from the start of the process on.
COUNTERS = "reconnects dropped_steps refused env_failures mirror_failures server_starts"


class Flags(Group):
    metrics_port: int = flag(0, "answer Prometheus and probes; 0: not", PORT, START)
    metrics_host: str = flag(
        "127.0.0.1", "0.0.0.0: for other machines, too", START, needs="metrics_port"
    )


def attach(run: Any) -> "Metrics | None":
    return Metrics(run) if run.flags.metrics_port else None


class Endpoint(socketserver.ThreadingTCPServer):
    """Answers in a thread until it is closed. Raises FlagError if it can't listen.

    Args:
      source: has numbers(), by name, and liveness() and readiness(), which return what
        is wrong, or None. Other threads call them.
    """

    allow_reuse_address = daemon_threads = True

    def __init__(self, flags: Any, source: Any) -> None:
        with needing("--metrics_port", "prometheus-client"):
            import prometheus_client as prometheus
        probes = {"/livez": source.liveness, "/readyz": source.readiness}

        class Handler(prometheus.MetricsHandler):
            registry: Any = prometheus.CollectorRegistry()
            timeout = REQUEST_SECONDS

            def do_GET(self) -> None:
                if probe := probes.get(self.path):
                    problem = probe()
                    self.send_response(503 if problem else 200)
                    self.end_headers()
                    self.wfile.write(f"{problem or 'ok'}\n".encode())
                else:
                    super().do_GET()

        prometheus.ProcessCollector(registry=Handler.registry)
        self._source = source
        Handler.registry.register(self)
        place = flags.metrics_host, flags.metrics_port
        with using(f"--metrics_host {place[0]} with --metrics_port {place[1]}"):
            super().__init__(place, Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def collect(self) -> Iterable[Any]:
        """Prometheus' metric families."""
        yield from itertools.starmap(family, self._source.numbers().items())

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return threading.active_count() < MOST_THREADS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""

    def close(self, status: int = 0) -> None:
        self.shutdown()
        self.server_close()


class Metrics(Endpoint):
    """The endpoint of a learner, with the newest value of each column."""

    def __init__(self, run: Any) -> None:
        self._run, self._flags, self._row = run, run.flags, dict[str, Any]()
        super().__init__(run.flags, self)

    def row(self, row: dict[str, Any]) -> None:
        new = {k: x for k, x in row.items() if x is not None}
        self._row = self._row | new | {"last_batch_timestamp_seconds": time.time()}

    def liveness(self) -> str | None:
        """What is wrong if the main loop hangs. It may save for long."""
        seconds = 0.0 if self._run.saving else time.monotonic() - self._run.round_at
        limit = max(ROUND_SECONDS, 3 * self._flags.actor_timeout)  # as ranks may wait
        return f"the main loop hangs for {seconds:.0f} s" if seconds > limit else None

    def readiness(self) -> str | None:
        if self._row.get("step", 0) >= self._flags.total_steps:
            return None  # what is left is an evaluation and the last checkpoint
        age = time.time() - self._row.get("last_batch_timestamp_seconds", 0)
        return f"no batch for {READY_SECONDS:g} s" if age > READY_SECONDS else None

    def collect(self) -> Iterable[Any]:
        yield family("run_info", 1, xpid=self._flags.xpid, env=self._flags.env)
        for numbers in (self._row, *self._run.guests.all("numbers")):
            yield from itertools.starmap(family, numbers.items())


def family(name: str, value: float, **labels: str) -> Any:
    from prometheus_client import core

    is_counter = name in COUNTERS.split()
    kind = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
    name = re.sub("[^a-zA-Z0-9_]", "_", name)  # a column of a fork may have any
    found = kind(f"torchbeast_{name}", "See docs/monitoring.md.", labels=list(labels))
    found.add_metric(list(labels.values()), value)
    return found
