"""Whose address it is: sockets, tokens and names that nobody else can use unseen."""

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time

import pytest
from certificates import Certificates

from libtorchbeast import Listener, RefusedError, Security, probe
from torchbeast.base.errors import FlagError
from torchbeast.polybeast import security

SECONDS = 60.0
NOBODY = 65534

SQUATTER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
os.chmod(sys.argv[1], 0o777)
print("there", flush=True)
peer, _ = listener.accept()
print(len(peer.recv(100)), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_socket_of_another_user_is_not_dialled():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        address = f"unix:{folder}/socket"
        command = [sys.executable, "-c", SQUATTER, f"{folder}/socket", str(NOBODY)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as squatter:
            assert squatter.stdout.readline() == b"there\n"
            with pytest.raises(RefusedError, match=f"belongs to user {NOBODY}"):
                probe(address, SECONDS, security=Security(token="secret"))
            assert squatter.stdout.readline() == b"0\n"  # it heard nothing


def test_nobody_is_taken_in_unseen(tmp_path):
    made = Certificates(tmp_path)
    made.make("learner", "DNS:learner")
    identity = made.identity("learner")
    with pytest.raises(ValueError, match="anybody who reaches"):
        Listener("0.0.0.0:0", security=Security(**identity))
    for enough in (made.ca(), {"token": "x"}, {"insecure": True}):
        Listener("0.0.0.0:0", security=Security(**identity, **enough))


def test_the_default_sockets_lie_in_a_private_folder(tmp_path, monkeypatch):
    folder = tmp_path / "torchbeast"
    monkeypatch.setattr(security, "PRIVATE_FOLDER", str(folder))
    security.make_private_folder(f"unix:{tmp_path}/other/place")
    assert not folder.exists()
    for _ in range(2):
        security.make_private_folder(f"unix:{folder}/polybeast")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o777)
    with contextlib.ExitStack() as stack:  # what dead servers have left is removed
        for name, age in (("dead", 99), ("alive", 99), ("starts", 0)):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{folder}/{name}")
            lock = stack.enter_context(open(folder / f"{name}.lock", "wb"))
            os.utime(lock.name, (time.time() - age,) * 2)
            if name == "alive":
                fcntl.flock(lock, fcntl.LOCK_EX)
        security.make_private_folder(f"unix:{folder}/polybeast")
    left = {x.name for x in folder.iterdir()}
    assert left == {"alive", "alive.lock", "starts", "starts.lock"}
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path)
    with pytest.raises(FlagError, match="not your folder"):
        security.make_private_folder(f"unix:{folder}/polybeast")
    if os.geteuid() == 0:
        folder.unlink()
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
        with pytest.raises(FlagError, match=f"belongs to user {NOBODY}"):
            security.make_private_folder(f"unix:{folder}/polybeast")
