"""Flags of PolyBeast's servers that can not work."""

import os

import pytest
from certificates import Certificates

from torchbeast.polybeast import env as polybeast_env


def bad_flags(tmp_path):
    """Flags of polybeast_env that can't work, and words of the message."""
    certificates = Certificates(tmp_path)
    certificates.make("one", "IP:127.0.0.1")
    one = certificates.identity("one")
    missing, empty, text = (tmp_path / x for x in ("missing", "empty", "text"))
    binary, fifo, large = (tmp_path / x for x in ("binary", "fifo", "large"))
    os.mkfifo(fifo)
    with large.open("wb") as file:
        file.truncate(2**32)
    empty.touch()
    text.write_text("not a certificate")
    binary.write_bytes(b"\xff\xfe")
    here = "127.0.0.1:0"
    return [
        ({"bind": "127.0.0.1:http"}, "--bind must be HOST:PORT"),
        ({"bind": "127.0.0.1:65534", "num_servers": 3}, "with 3 ports from PORT on"),
        ({"bind": here, "tls_cert": missing, "tls_key": missing}, "No such file"),
        ({"bind": here, "tls_cert": text, "tls_key": text}, f"--tls_cert {text}"),
        ({"bind": here, **one, "tls_ca": text}, "--tls_ca"),
        *(({"token_file": x}, "must have printable ASCII") for x in (empty, binary)),
        *(({"token_file": x}, "at most 1 MiB") for x in ("/dev/zero", fifo, large)),
    ]


def test_flags_of_servers_that_cannot_work(tmp_path, caplog):
    """They are refused before a process is started, in one line."""
    for flags, words in bad_flags(tmp_path):
        caplog.clear()
        argv = [f"--{name}={value}" for name, value in flags.items()]
        assert polybeast_env.main(argv) == 1
        (record,) = caplog.records
        message = record.getMessage()
        assert message.startswith(("FlagError: ", "FileError: "))
        assert words in message
        assert "\n" not in message
        assert not record.exc_info
    for name in ("tls_ca", "tls_server_name", "token_file", "join"):
        with pytest.raises(SystemExit):  # not as if it had been left out
            polybeast_env.main([f"--{name}="])
