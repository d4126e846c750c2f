"""Servers on one host, the learner on another; the link between them is cut.

The hosts are network namespaces, joined by a pair of virtual Ethernet devices.
"""

import itertools
import os
import shutil
import signal
import subprocess
import time

import pytest
import runs
import watched_runs
from certificates import Certificates
from watched_servers import (
    LEARNER,
    E,
    Servers,
    T,
    assert_says,
    assert_whole_updates,
    rows_of,
)

pytestmark = pytest.mark.timeout(300)  # cuts take their time on a busy machine, too

SERVERS, LEARNERS = "10.213.0.1", "10.213.0.2"
_numbers = itertools.count()

PATIENT = 60.0  # seconds, for what takes as long as the network likes


class Hosts:
    """Two network namespaces, whose one link can be cut."""

    def __init__(self):
        number = next(_numbers)
        self.names = [f"beast-{os.getpid()}-{number}-{side}" for side in "ab"]
        a, b = self.names
        try:
            for name in self.names:
                self.ip("netns", "add", name)
            pair = ("link", "add", "veth0", "netns", a, "type", "veth")
            self.ip(*pair, "peer", "name", "veth0", "netns", b)
            for name, address in ((a, SERVERS), (b, LEARNERS)):
                self.ip("-n", name, "link", "set", "lo", "up")
                self.ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
                self.ip("-n", name, "link", "set", "veth0", "up")
                self.ip("netns", "exec", name, "true")
        except BaseException:
            self.remove()
            raise

    @staticmethod
    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    def on(self, side):
        """Words that run a command on host 0 or 1."""
        return ("ip", "netns", "exec", self.names[side])

    def cut(self):
        """Cuts the link; neither side gets an error."""
        self.ip("-n", self.names[0], "link", "set", "veth0", "down")

    def restore(self):
        self.ip("-n", self.names[0], "link", "set", "veth0", "up")

    def connections(self):
        """The number of connections that the servers have."""
        # IPv4 in the guise of IPv6, too.
        tables = ("/proc/net/tcp", "/proc/net/tcp6")
        text = subprocess.check_output([*self.on(0), "cat", *tables], text=True)
        established = "01"
        return sum(line.split()[3] == established for line in text.splitlines())

    def remove(self):
        for name in self.names:
            subprocess.run(
                ["ip", "netns", "del", name], capture_output=True, check=False
            )


@pytest.fixture
def hosts():
    if not shutil.which("ip"):
        runs.skip("the program ip (iproute2) is not installed")
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    try:
        found = Hosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces: {error.stderr.strip()}")
    try:
        yield found
    finally:
        found.remove()


@pytest.fixture
def security(tmp_path):
    """Flags of both sides: a token, and a certificate for each side."""
    certificates = Certificates(tmp_path)
    certificates.make("servers", f"IP:{SERVERS}")
    certificates.make("learner", f"IP:{LEARNERS}")
    token = tmp_path / "token"
    token.write_text("between-us")
    shared = {"token_file": token, **certificates.ca()}
    return [
        {**shared, **certificates.identity(side)} for side in ("servers", "learner")
    ]


@pytest.fixture
def serve(hosts, security, tmp_path):
    """Starts servers on their host; what is left of them is killed after the test."""
    started = []

    def start(**flags):
        bind = f"{SERVERS}:5000"
        servers = Servers(tmp_path, hosts.on(0), bind=bind, **security[0], **flags)
        started.append(servers)
        servers.addresses(flags.get("num_servers", 1))
        return servers

    yield start
    for servers in started:
        servers.kill()


@pytest.fixture
def learn(hosts, security, tmp_path):
    """Starts learners on theirs; what is left of them is killed after the test."""
    started = []

    def start(xpid, **flags):
        flags = {**LEARNER, **security[1], **flags}
        started.append(watched_runs.Run(tmp_path, xpid, prefix=hosts.on(1), **flags))
        return started[-1]

    yield start
    for run in started:
        run.kill()


def end(servers):
    servers.process.send_signal(signal.SIGTERM)
    servers.wait_for_end(143)


def losses(run):
    row = rows_of(run)[-1]
    return int(row["reconnects"]), int(row["dropped_steps"])


def wait_for_more(run):
    """Waits for reconnections, for as long as the backoff may take."""
    before = len(rows_of(run))
    watched_runs.wait_until(
        lambda: run.process.poll() is not None or len(rows_of(run)) > before + 10,
        "training goes on",
        PATIENT,
    )
    assert run.process.poll() is None, run.console


@pytest.mark.slow
def test_the_link_is_cut_and_restored(hosts, serve, learn):
    """A cut of 2 s, which TCP survives; then of 20 s or more, which ends streams."""
    servers = serve(num_servers=2)
    both = f"{SERVERS}:5000,{SERVERS}:5001"
    num_streams = 3
    run = learn(
        "patient", server_addresses=both, num_actors=num_streams, connect_timeout=60
    )
    impatient = learn("impatient", server_addresses=both, connect_timeout=6)
    for each in (run, impatient):
        each.wait_for_updates(10)

    hosts.cut()
    time.sleep(2)
    hosts.restore()
    for each in (run, impatient):
        wait_for_more(each)
        assert losses(each) == (0, 0)

    hosts.cut()
    start = time.monotonic()
    impatient.wait_for_end(1, PATIENT)
    assert_says(impatient, "TransportError: no connection for 6 s: ", SERVERS)
    impatient.assert_files()
    assert_whole_updates(impatient)
    time.sleep(max(0.0, start + 20 - time.monotonic()))
    assert run.process.poll() is None, run.console
    hosts.restore()
    wait_for_more(run)
    run.wait_for(lambda: losses(run)[0] == num_streams, "all streams came back")
    reconnects, dropped_steps = losses(run)
    assert reconnects == num_streams
    # Less than an unroll of each, and they are cut in the middle of one or not.
    assert dropped_steps <= num_streams * E * T
    assert dropped_steps % E == 0
    watched_runs.wait_until(
        lambda: hosts.connections() == num_streams, "no lost one is held", PATIENT
    )
    run.process.send_signal(signal.SIGINT)
    run.wait_for_end(130)
    run.assert_no_error()
    assert_whole_updates(run)
    end(servers)
