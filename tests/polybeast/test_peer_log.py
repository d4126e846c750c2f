"""What a learner logs about its peers, and what of their texts."""

import logging

import numpy as np
import pytest
import servers
from test_actor_pool import act, initial_state
from test_join import joined, listening

from libtorchbeast import Client, RefusedError, Server
from torchbeast.polybeast import remote_envs
from torchbeast.polybeast.remote_envs import PeerLog

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b\r\n[ERROR 12:00:00] forged \u202e\u2028\x7f end\x00"


def refusals(peer, number, reason="the token is missing or wrong"):
    who = f"the environment that has joined from {peer}"
    return [(0.0, "refused", f"{who}:{i}: {reason} {i}") for i in range(number)]


def test_one_peer_does_not_silence_the_others(caplog):
    caplog.set_level(logging.INFO)
    log = PeerLog()
    flood = refusals("ipv4:10.0.0.6", 500)
    log.report((flood, 7000))
    log.report((refusals("ipv6:%5B::6%5D", 3), 0))
    server = "the environment server at unix:/tmp/a.0 is lost: why"
    log.report(
        ([(0.0, "lost", server), *refusals("this machine (connection 4)", 1)], 0)
    )
    assert caplog.text.count("10.0.0.6") == remote_envs.LINES
    assert caplog.text.count("%5B::6%5D") == 3
    assert server in caplog.text


def test_peers_without_number(caplog):
    log = PeerLog()
    for i in range(3 * remote_envs.MOST_REFUSED):
        log.report((refusals(f"ipv4:10.1.{i // 256}.{i % 256}", 1), 0))
    lost = "the environment server at unix:/tmp/a.0 is lost: why"
    log.report(([(0.0, "lost", lost)], 0))
    assert lost in caplog.text, "strangers do not silence a stream of the run"
    assert caplog.text.count("A stream is refused") == remote_envs.MOST_REFUSED


class Evil(servers.Coded):
    def step(self, action):
        raise ValueError(EVIL)


class Grows(servers.Coded):
    def observation(self, action):
        return np.zeros(4 + self.step_number, np.int32)


def assert_harmless(text):
    assert "end" in text
    assert "\\x1b" in text
    for i, line in enumerate(text.split("\n")):
        assert line.isprintable(), line
        assert i == 0 or line.startswith("  | "), line


def test_texts_of_peers_are_escaped(address, tmp_path):
    """The traceback of an environment, its name, and a learner's refusal."""
    with listening(address, expected={"name": "Coded"}) as listener:
        with pytest.raises(RefusedError) as refusal:
            Client(servers.Coded, address, name=EVIL).run()
        assert_harmless(str(refusal.value))
        ((_, _, text),), _ = listener.events()
        assert_harmless(text)
        assert_harmless(listener.stats()["last_refusal"])
    with listening(address) as listener, joined(listener, max_env_failures=9) as run:
        with pytest.raises(RuntimeError):
            Client(Evil, address).run()
        ((_, kind, text),), _ = run.pool.events()
        assert kind == "env_error"
        assert_harmless(text)
        assert_harmless(run.pool.stats()["last_error"])
        with pytest.raises(RuntimeError, match=r"gave int32 \[5\], not int32 \[4\]"):
            Client(Grows, address).run()
    server = Server(Evil, f"unix:{tmp_path}/evil")
    server.start()
    with servers.Run([server.address], act, initial_state()) as run:
        assert_harmless(str(run.error()))
    server.stop()
