"""Certificates for tests, made by the openssl program."""

import subprocess

import runs


class Certificates:
    """A folder of them: {name}.pem with {name}.key, of "ours" or "foreign"."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("ours", "foreign"):
            words = (*self._new_key(name), "-days", "2", "-subj", f"/CN={name}")
            self._openssl("req", "-x509", *words, "-out", f"{name}.pem")

    def make(self, name, subject, authority="ours", expired=False):
        """A certificate for `subject`, such as IP:127.0.0.1 or DNS:host."""
        words = ("-addext", f"subjectAltName={subject}", "-out", f"{name}.csr")
        self._openssl("req", *self._new_key(name), "-subj", f"/CN={name}", *words)
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem"),
            *("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"),
            *("-CAcreateserial", "-copy_extensions", "copy"),
            *("-days", "0" if expired else "2"),  # 0: it ends with this second
        )

    def ca(self, authority="ours"):
        """The flag, and argument of libtorchbeast, of who is trusted."""
        return {"tls_ca": self.folder / f"{authority}.pem"}

    def identity(self, name):
        """The flags of a certificate of one's own."""
        files = {"tls_cert": f"{name}.pem", "tls_key": f"{name}.key"}
        return {flag: self.folder / file for flag, file in files.items()}

    def _new_key(self, name):
        curve = ("-pkeyopt", "ec_paramgen_curve:prime256v1")
        return ("-newkey", "ec", *curve, "-nodes", "-keyout", f"{name}.key")

    def _openssl(self, *words):
        place = {"cwd": self.folder, "capture_output": True}
        try:
            subprocess.run(["openssl", *words], check=True, **place)
        except FileNotFoundError:
            runs.skip("openssl is not installed")
