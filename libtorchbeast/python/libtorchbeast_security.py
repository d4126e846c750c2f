"""The arguments of libtorchbeast.Security: reads and checks files, shows no secret."""

import os
import stat
from typing import Any

MAX_PEM_BYTES = 2**20
SWITCHES = ("tls", "insecure")
FILES = ("tls_ca", "tls_cert", "tls_key")
TEXTS = ("tls_server_name", "token")


def read(**given: Any) -> tuple[Any, ...]:
    """The values of SWITCHES, FILES and TEXTS, in this order: contents of files.

    Raises:
      TypeError: an argument that Security does not have, or of a wrong type. A value is
        not shown: it may be a secret.
      ValueError: a file can't be read or used, or a text is empty.
    """
    known = (*SWITCHES, *FILES, *TEXTS)
    for name in given:
        if name not in known:
            allowed = "tls, tls_ca, tls_cert, tls_key, tls_server_name, token, insecure"
            raise TypeError(f"Security has no argument {name}; allowed are {allowed}")
    values: list[Any] = []
    for name in known:
        value = given.get(name)
        if name in SWITCHES:
            if not (value is None or hasattr(value, "__bool__")):
                raise _wrong_type(name, "a bool", value)
            values.append(bool(value))
        elif value is None:
            values.append("")
        elif name in FILES:
            values.append(_read_pem(name, value))
        elif not isinstance(value, str):
            raise _wrong_type(name, "a str", value)
        elif not value:
            raise ValueError(f"{name} is empty; give None for no {name}")
        else:
            values.append(value)
    _check_tls(*map(given.get, FILES))
    return tuple(values)


def show(**given: Any) -> str:
    """The repr of a Security with these arguments; secrets are True or False."""
    shown = {
        name: "..." if name in FILES or name == "token" else repr(value)
        for name, value in given.items()
        if value
    }
    return f"Security({', '.join(f'{name}={text}' for name, text in shown.items())})"


def _wrong_type(name: str, wanted: str, value: Any) -> TypeError:
    return TypeError(f"{name} must be {wanted}, not {type(value).__name__}")


def _read_pem(name: str, path: Any) -> bytes:
    try:
        what = f"{name} {os.fsdecode(path)}"
    except TypeError:
        raise _wrong_type(name, "a path", path) from None
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_PEM_BYTES:
            raise ValueError(f"{what} must be a file of at most 1 MiB")
        with open(path, "rb") as file:
            text = file.read(MAX_PEM_BYTES)
    except OSError as error:
        raise ValueError(f"{what} cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in text:
        raise ValueError(f"{what} is not a PEM file: it has no line with -----BEGIN")
    return text


def _check_tls(ca: Any, cert: Any, key: Any) -> None:
    """gRPC would listen with certificates and keys that can't be used."""
    if (cert is None) != (key is None):
        missing = "tls_cert" if cert is None else "tls_key"
        raise ValueError(f"{missing} is missing: tls_cert and tls_key go together")
    if ca is None and cert is None:
        return
    import ssl  # slow

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # weak ones are the user's choice
    what = f"tls_ca {ca}"
    try:
        if ca is not None:
            context.load_verify_locations(ca)
        if cert is not None:
            what = f"tls_cert {cert} with tls_key {key}"
            # With a password, so that ssl does not ask for one.
            context.load_cert_chain(cert, key, "")
    except OSError as error:
        raise ValueError(f"{what}: {error}") from None
