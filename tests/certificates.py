"""Certificates for tests, made by the openssl program."""

import pathlib
import subprocess

import runs


class Certificates:
    """A folder of them: {name}.pem with {name}.key, each `name` as in `make`.

    The authorities are "ours" and "foreign".
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        for authority in ("ours", "foreign"):
            self._openssl(
                *("req", "-x509", *self._new_key(authority), "-days", "2"),
                *("-subj", f"/CN={authority}", "-out", f"{authority}.pem"),
            )

    def make(
        self, name: str, subject: str, authority: str = "ours", expired: bool = False
    ) -> None:
        """A certificate for `subject`, such as IP:127.0.0.1 or DNS:host."""
        self._openssl(
            *("req", *self._new_key(name), "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName={subject}", "-out", f"{name}.csr"),
        )
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem"),
            *("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"),
            *("-CAcreateserial", "-copy_extensions", "copy"),
            *("-days", "0" if expired else "2"),  # 0: it ends with this second
        )

    def ca(self, authority: str = "ours") -> dict[str, pathlib.Path]:
        """The flag, and argument of libtorchbeast, of who is trusted."""
        return {"tls_ca": self.folder / f"{authority}.pem"}

    def identity(self, name: str) -> dict[str, pathlib.Path]:
        """The flags of a certificate of one's own."""
        return {
            "tls_cert": self.folder / f"{name}.pem",
            "tls_key": self.folder / f"{name}.key",
        }

    def _new_key(self, name: str) -> tuple[str, ...]:
        curve = ("-pkeyopt", "ec_paramgen_curve:prime256v1")
        return ("-newkey", "ec", *curve, "-nodes", "-keyout", f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        try:
            subprocess.run(
                ["openssl", *arguments],
                cwd=self.folder,
                check=True,
                capture_output=True,
            )
        except FileNotFoundError:
            runs.skip("openssl is not installed")
