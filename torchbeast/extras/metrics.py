"""--metrics_port: a process answers Prometheus and probes, by HTTP.

    /metrics   numbers in Prometheus' format
    /livez     200 if the process lives, 503 if it should be started again
    /readyz    200 if it does its work, 503 if not now

An answer of 503 says why. Importing this module does not load torch.
"""

from __future__ import annotations

import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torchbeast.base.errors import needing, using
from torchbeast.base.flag import START, Group, Range, flag

PORT = Range(0, 65535, "at least 0 and at most 65535")
ROUND_SECONDS = 600.0  # least time in which the main loop goes round, while it lives
REQUEST_SECONDS = 5.0  # for which a client may say nothing
MOST_THREADS = 256  # of the process; beyond it connections are closed
# A learner is ready if its last batch is not older than this, and than ten times the
# usual time from one to the next.
READY_SECONDS = 300.0
# These count from the start of the process on.
COUNTERS = {
    *("reconnects", "dropped_steps", "refused", "env_failures"),
    *("mirror_failures", "server_starts"),
}

Probe = Callable[[], str | None]  # what is wrong, or None


class Flags(Group):
    metrics_port: int = flag(
        *(0, "answer Prometheus and probes of liveness and readiness here; 0: not"),
        *(PORT, START),
    )
    metrics_host: str = flag(
        *("127.0.0.1", "address of it; 0.0.0.0 lets other machines read the numbers"),
        START,
        needs="metrics_port",
    )


def attach(run: Any) -> Metrics | None:
    return Metrics(run) if run.flags.metrics_port else None


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 64

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return threading.active_count() < MOST_THREADS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


class _Collector:
    """What Prometheus' registry takes: an object with this method."""

    def __init__(self, collect: Callable[[], Iterable[Any]]) -> None:
        self.collect = collect


class Endpoint:
    """Answers in a thread until it is closed.

    Args:
      collect: returns Prometheus' metric families. It is called in other threads, and
        so are the probes.

    Raises:
      FlagError: the package is missing, or the port can't be used.
    """

    def __init__(
        self,
        flags: Any,
        collect: Callable[[], Iterable[Any]],
        liveness: Probe,
        readiness: Probe,
    ) -> None:
        with needing("--metrics_port", "prometheus-client"):
            import prometheus_client as prometheus
        probes = {"/livez": liveness, "/readyz": readiness}

        class Handler(prometheus.MetricsHandler):
            registry: Any = prometheus.CollectorRegistry()
            timeout = REQUEST_SECONDS

            def do_GET(self) -> None:
                if self.path not in probes:
                    super().do_GET()
                    return
                problem = probes[self.path]()
                self.send_response(503 if problem else 200)
                self.end_headers()
                self.wfile.write(f"{problem or 'ok'}\n".encode())

        prometheus.ProcessCollector(registry=Handler.registry)
        Handler.registry.register(_Collector(collect))
        place = flags.metrics_host, flags.metrics_port
        with using(f"--metrics_host {place[0]} with --metrics_port {place[1]}"):
            self._server = _Server(place, Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Metrics:
    """The endpoint of a learner, with the newest value of each column."""

    def __init__(self, run: Any) -> None:
        self._run, self._flags = run, run.flags
        self._row: dict[str, Any] = {}
        self._batches, self._started, self._learned = 0, time.monotonic(), 0.0
        self._endpoint = Endpoint(
            self._flags, self._collect, self.liveness, self.readiness
        )

    def row(self, row: dict[str, Any]) -> None:
        row = {k: x for k, x in row.items() if x is not None}
        # A column of a fork may have any name.
        known = {re.sub("[^a-zA-Z0-9_]", "_", k): x for k, x in row.items()}
        self._row = self._row | known | {"last_batch_timestamp_seconds": time.time()}
        self._batches, self._learned = self._batches + 1, time.monotonic()

    def close(self, status: int) -> None:
        self._endpoint.close()

    def liveness(self) -> str | None:
        """What is wrong if the main loop hangs. It may save for long."""
        seconds = 0.0 if self._run.saving else time.monotonic() - self._run.round_at
        limit = max(ROUND_SECONDS, 3 * self._flags.actor_timeout)  # as ranks may wait
        return f"the main loop hangs for {seconds:.0f} s" if seconds > limit else None

    def readiness(self) -> str | None:
        if self._row.get("step", 0) >= self._flags.total_steps:
            return None  # what is left is an evaluation and the last checkpoint
        if not self._batches:
            return "there was no batch yet"
        usual = (self._learned - self._started) / self._batches
        seconds = time.monotonic() - self._learned
        late = seconds > max(READY_SECONDS, 10 * usual)
        return f"the last batch was {seconds:.0f} s ago" if late else None

    def _collect(self) -> Iterable[Any]:
        yield family("run_info", 1, xpid=self._flags.xpid, env=self._flags.env)
        for name, value in self._row.items():
            yield family(name, value)
        for numbers in self._run.guests.all("numbers"):
            for name, value in numbers.items():
                yield family(name, value)


def family(name: str, value: float, **labels: str) -> Any:
    from prometheus_client import core

    kind = core.CounterMetricFamily if name in COUNTERS else core.GaugeMetricFamily
    found = kind(f"torchbeast_{name}", "See docs/monitoring.md.", labels=list(labels))
    found.add_metric(list(labels.values()), value)
    return found
