"""The flags of PolyBeast's scripts. Importing this module does not load torch."""

import argparse
import os
from typing import Any

from torchbeast.base.flag import COUNT, COUNT_OR_0, FREE, SECONDS, Group, flag
from torchbeast.flags import SEED, Run

# Only this user can create sockets here, in any session (unlike XDG_RUNTIME_DIR).
PRIVATE_FOLDER = f"/tmp/torchbeast-{os.getuid()}"
PIPES_BASENAME = f"unix:{PRIVATE_FOLDER}/polybeast"


def text(help: str, default: str | None = None) -> Any:
    """Declares a text. An empty one, such as of an unset variable, is refused."""

    def converter(value: str) -> str:
        if not value:
            raise argparse.ArgumentTypeError("it is empty; leave the flag out")
        return value

    return flag(default, help, FREE, converter=converter)


# fmt: off
class PolyBeast(Group):
    title = "PolyBeast"
    server_addresses: str | None = text(
        "servers to connect to: host:port or host:first-last,..., or @FILE")
    listen: str | None = text(
        "listen at HOST:PORT or unix:PATH; environments connect to the learner")
    connect_timeout: float = flag(60.0,
        "seconds without a connected stream after which the run ends", SECONDS, FREE)
    max_env_failures: int = flag(10,
        "environments that may raise or break a rule per minute; those of one server "
        "or machine don't count while another is connected", COUNT_OR_0)
    actor_device: str | None = flag(None,
        "device for inference (default: the second GPU, else the learner's)", FREE)
    num_inference_threads: int = flag(1, "inference threads", COUNT, FREE)
    max_learner_queue_size: int = flag(None,
        "maximal rollouts in the queue (default: --batch_size)", COUNT)
    num_actions: int | None = flag(None,
        "expected number of actions; the run ends if it differs", COUNT, FREE)


class Connection(Group):
    """Both sides of a connection have these."""

    title = "connection"
    pipes_basename: str = text(
        "path of the servers' sockets on one machine, to which .0, .1, ... are "
        "added (torchbeast.polybeast: a new one per run)", PIPES_BASENAME)
    num_servers: int = flag(4,
        "server processes; polybeast: by default one per stream or core", COUNT)
    envs_per_actor: int = flag(8,
        "environments per stream; polybeast_learner accepts any number by default",
        COUNT)
    tls: bool = flag(False, "use TLS; implied by the other --tls flags", FREE)
    tls_server_name: str | None = text(
        "name in the other side's certificate, if it is not the host's")
    tls_cert: str | None = text("PEM file with this side's certificate")
    tls_key: str | None = text("PEM file with its key")
    tls_ca: str | None = text(
        "PEM file with the signer of the other side's certificate; by default the "
        "side that connects trusts the system's signers")
    token_file: str | None = text("file with the secret of both sides")
    insecure: bool = flag(False,
        "allow plain TCP beyond this machine, TLS without a token or client "
        "certificate, and unix sockets of other users", FREE)


class Servers(Group):
    title = "environment servers"
    bind: str | None = text(
        "listen at HOST:PORT, and the next ports for further servers")
    join: str | None = text(
        "connect to a learner with --listen at HOST:PORT or unix:PATH")
    max_restarts: int = flag(5,
        "crashes in a row, each within 10 s; with one more the servers end",
        COUNT_OR_0, FREE)


class OfServers(Group):
    """What polybeast_env takes of the group Run."""

    preset: str | None = Run.preset
    actor_timeout: float = flag(300.0,
        "seconds for a server to get ready, or for a step; at least 300", SECONDS)
    seed: int = flag(1,
        "seed of the environments, if the learner sends none", SEED)
