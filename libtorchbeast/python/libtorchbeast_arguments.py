"""Arguments of libtorchbeast: certificates, tensors, memory, expected environments."""

import os
import stat
from typing import Any

MAX_BYTES = 2**20  # of a file
SWITCHES = ("tls", "insecure")
FILES = ("tls_ca", "tls_cert", "tls_key")
NAMES = ("tls", *FILES, "tls_server_name", "token", "insecure")


def read_security(given: dict[str, Any]) -> tuple[Any, ...]:
    """The values of NAMES; of FILES the contents.

    Raises:
      TypeError: an argument that Security does not have, or of a wrong type. A value is
        not shown: it may be a secret.
      ValueError: a file can't be read or used, or a text is empty.
    """
    for name in given:
        if name not in NAMES:
            allowed = ", ".join(NAMES)
            raise TypeError(f"Security has no argument {name}; allowed are {allowed}")
    values: list[Any] = []
    for name in NAMES:
        value = given.get(name)
        if name in SWITCHES:
            if not (value is None or hasattr(value, "__bool__")):
                raise _wrong_type(name, "a bool", value)
            values.append(bool(value))
        elif value is None:
            values.append("")
        elif name in FILES:
            text = read_file(name, value)
            if b"-----BEGIN " not in text:
                what = f"{name} {os.fsdecode(value)} is not a PEM file"
                raise ValueError(f"{what}: it has no line with -----BEGIN")
            values.append(text)
        elif not isinstance(value, str):
            raise _wrong_type(name, "a str", value)
        elif not value:
            raise ValueError(f"{name} is empty; give None for no {name}")
        else:
            values.append(value)
    _check_tls(*map(given.get, FILES))
    return tuple(values)


def show_security(*values: Any) -> str:
    """The repr of a Security with these values of NAMES; those of secrets are bools."""
    texts = [
        f"{name}={'...' if name in (*FILES, 'token') else repr(value)}"
        for name, value in zip(NAMES, values, strict=True)
        if value
    ]
    return f"Security({', '.join(texts)})"


def _wrong_type(name: str, wanted: str, value: Any) -> TypeError:
    return TypeError(f"{name} must be {wanted}, not {type(value).__name__}")


def read_file(name: str, path: Any) -> bytes:
    """The contents, of at most 1 MiB. Raises ValueError, which begins with `name`."""
    try:
        what = f"{name} {os.fsdecode(path)}"
    except TypeError:
        raise _wrong_type(name, "a path", path) from None
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            raise ValueError(f"{what} must be a file of at most 1 MiB")
        with open(path, "rb") as file:
            return file.read(MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{what} cannot be read: {error.strerror}") from None


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


def read_expected(given: Any) -> tuple[str, int, dict[str, str]]:
    """The name, num_envs and settings that `expected` has; empty or 0: any.

    Raises TypeError, or ValueError if it has more.
    """
    if not isinstance(given, dict):
        raise _wrong_type("expected", "a dict", given)
    if unknown := given.keys() - {"name", "num_envs", "settings"}:
        raise ValueError(
            f"expected may have name, num_envs and settings, but has {min(unknown)}"
        )
    name, num_envs = given.get("name", ""), given.get("num_envs", 0)
    settings = given.get("settings", {})
    if not isinstance(name, str):
        raise _wrong_type("expected['name']", "a str", name)
    if not hasattr(num_envs, "__index__"):
        raise _wrong_type("expected['num_envs']", "an int", num_envs)
    is_dict = isinstance(settings, dict)
    if not (
        is_dict and all(isinstance(x, str) for x in (*settings, *settings.values()))
    ):
        raise _wrong_type("expected['settings']", "a dict of str to str", settings)
    return name, num_envs, settings


def explain_tensor(tensor: Any, error: Exception) -> str:
    """Why a torch tensor has no NumPy array, up to the list of dtypes."""
    if str(tensor.device) != "cpu":
        where = f"a tensor on the device {tensor.device}"
        return f"{where}, call .cpu(): only those on the CPU can be shared, of "
    what = f"a tensor of {tensor.dtype} that cannot be shared ({error})"
    return f"{what}; convert it, for example by .float(). Allowed are dense tensors of "


def to_memoryview(memory: Any, num_bytes: int) -> memoryview:
    """What an allocator has given. Raises ValueError if no batch can be made there."""
    view, why = memoryview(memory), ""
    if view.readonly:
        why = "is read-only"
    elif not view.c_contiguous:
        why = "is not C-contiguous"
    elif view.nbytes < num_bytes:
        why = f"has {view.nbytes} bytes, {num_bytes} are needed"
    if why:
        raise ValueError(f"the allocator's memory {why}")
    return view


def default_rollout_bytes() -> int:
    """Half of the memory that this process may use."""
    from torchbeast.base import hardware

    return hardware.memory_limit() // 2
