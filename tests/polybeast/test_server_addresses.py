"""Where libtorchbeast.Server listens, and who may connect."""

import pytest
import servers
from certificates import Certificates
from servers import Run
from test_env_server import Env, T, serving, zero

from libtorchbeast import (
    ActorPool,
    BatchingQueue,
    Security,
    Server,
    TransportError,
    probe,
)

# --- Addresses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ("unix:/tmp/" + "x" * 200, "205 bytes.*107|205 bytes.*allows"),
        ("nonsense", "host:port"),
        ("localhost:99999", "65535"),
    ],
)
def test_bad_addresses(bad, match):
    with pytest.raises(ValueError, match=match):
        Server(Env, bad)
    with pytest.raises(ValueError, match=match):
        probe(bad)


def test_plain_tcp_beyond_this_machine_is_refused():
    with pytest.raises(ValueError, match="insecure"):
        Server(Env, "0.0.0.0:0")
    with pytest.raises(ValueError, match="insecure"):
        probe("192.0.2.1:5000")
    with pytest.raises(ValueError, match="insecure"):
        ActorPool(T, BatchingQueue(), servers.DynamicBatcher(), ["192.0.2.1:1"], ())
    with serving(Env, "0.0.0.0:0", security=Security(insecure=True)) as server:
        port = server.address.rpartition(":")[2]
        assert probe(f"127.0.0.1:{port}")["num_envs"] == 1


# --- Token and TLS --------------------------------------------------------------------


def test_security_shows_no_secret_and_cannot_be_changed(tls):
    assert repr(Security()) == "Security()"
    security = Security(token="sesame", insecure=True, **identity(tls, "ours-server"))
    expected = "Security(tls_cert=..., tls_key=..., token=..., insecure=True)"
    assert repr(security) == expected
    assert repr(Security(tls=True, **NAME)) == (
        "Security(tls=True, tls_server_name='beast.example')"
    )
    with pytest.raises(AttributeError):
        security.token = "another"
    with pytest.raises(TypeError) as caught:  # its message has all arguments
        Server(Env, 3, security=security)
    assert "sesame" not in str(caught.value)


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A directory with certificates of our own and of a foreign authority."""
    certificates = Certificates(tmp_path_factory.mktemp("tls"))
    for authority in ("ours", "foreign"):
        certificates.make(f"{authority}-server", "DNS:beast.example", authority)
        certificates.make(f"{authority}-client", "DNS:me", authority)
    return certificates.folder


NAME = {"tls_server_name": "beast.example"}


def identity(tls, name):
    return {"tls_cert": tls / f"{name}.pem", "tls_key": str(tls / f"{name}.key")}


def test_tls(tls):
    ours = Security(**identity(tls, "ours-server"))
    right = Security(tls_ca=tls / "ours.pem", **NAME)
    with serving(Env, "127.0.0.1:0", security=ours) as server:
        assert probe(server.address, security=right)["num_envs"] == 1
        for wrong in (
            Security(tls_ca=tls / "foreign.pem", **NAME),  # another authority
            Security(
                tls_ca=tls / "ours.pem"
            ),  # the certificate's name is not the host's
            Security(),  # no TLS
        ):
            with pytest.raises(TransportError):
                probe(server.address, security=wrong)
        with Run([server.address], zeros, security=right) as run:
            assert next(run.queue)[0][0][0].shape == (T + 1, 1, 3)


def zeros(_):
    return (zero(0),), ()
