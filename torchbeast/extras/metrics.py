"""--metrics_port: a process answers Prometheus and probes, by HTTP.

    /metrics   numbers in Prometheus' format
    /livez     200 if the process lives, 503 if it should be started again
    /readyz    200 if it does its work, 503 if not now

An answer of 503 says why. Importing this module does not load torch.
"""

import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torchbeast.base.errors import needing, using
from torchbeast.flags import Flags

REQUEST_SECONDS = 5.0  # for which a client may say nothing
MOST_THREADS = 256  # of the process; beyond it connections are closed
# A learner is ready if its last batch is not older than this, and than ten times the
# usual time from one to the next.
READY_SECONDS = 300.0
# These count from the start of the process on.
COUNTERS = {
    *("env_warnings", "reconnects", "dropped_steps", "refused", "env_failures"),
    *("mirror_failures", "server_starts"),
}

Probe = Callable[[], str | None]  # what is wrong, or None


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 64

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return threading.active_count() < MOST_THREADS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


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
        flags: Flags,
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
        Handler.registry.register(type("", (), {"collect": staticmethod(collect)}))
        place = flags.metrics_host, flags.metrics_port
        with using(f"--metrics_host {place[0]} with --metrics_port {place[1]}"):
            self._server = _Server(place, Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Metrics:
    """A tracker: the endpoint of a learner, with the newest value of each column.

    Args:
      liveness: what is wrong with the run, or None.
      mirror: the tracker of --mirror, if there is one.
    """

    def __init__(self, flags: Flags, liveness: Probe, mirror: Any) -> None:
        self._flags, self._mirror = flags, mirror
        self._row: dict[str, Any] = {}
        self._batches, self._started, self._learned = 0, time.monotonic(), 0.0
        self._endpoint = Endpoint(flags, self._collect, liveness, self._readiness)

    def log(self, row: dict[str, Any]) -> None:
        row = {k: x for k, x in row.items() if x is not None}
        # A column of a fork may have any name.
        known = {re.sub("[^a-zA-Z0-9_]", "_", k): x for k, x in row.items()}
        if "env_warnings" in known:  # the number of one batch
            known["env_warnings"] += self._row.get("env_warnings", 0)
        self._row = self._row | known | {"last_batch_timestamp_seconds": time.time()}
        self._batches, self._learned = self._batches + 1, time.monotonic()

    def close(self, exit_status: int) -> None:
        self._endpoint.close()

    def _readiness(self) -> str | None:
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
        if self._mirror:
            yield family("mirror_failures", self._mirror.failures)
            yield family("mirror_copied_timestamp_seconds", self._mirror.copied_at)


def family(name: str, value: float, **labels: str) -> Any:
    from prometheus_client import core

    kind = core.CounterMetricFamily if name in COUNTERS else core.GaugeMetricFamily
    found = kind(f"torchbeast_{name}", "See docs/monitoring.md.", labels=list(labels))
    found.add_metric(list(labels.values()), value)
    return found
