"""Where libtorchbeast.Server listens, and who may connect."""

import pytest
import servers
from certificates import Certificates
from test_env_server import Env, T, serving

from libtorchbeast import ActorPool, BatchingQueue, Security, Server, probe


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


def test_security_shows_no_secret_and_cannot_be_changed(tmp_path):
    assert repr(Security()) == "Security()"
    made = Certificates(tmp_path)
    made.make("server", "DNS:beast.example")
    security = Security(token="sesame", insecure=True, **made.identity("server"))
    expected = "Security(tls_cert=..., tls_key=..., token=..., insecure=True)"
    assert repr(security) == expected
    assert repr(Security(tls=True, tls_server_name="beast.example")) == (
        "Security(tls=True, tls_server_name='beast.example')"
    )
    with pytest.raises(AttributeError):
        security.token = "another"
    with pytest.raises(TypeError) as caught:  # its message has all arguments
        Server(Env, 3, security=security)
    assert "sesame" not in str(caught.value)
