"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deeplink.kvconnector.wires.tls import Tls


class Authority:
    """A CA in `folder`."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl command here to make certificates with")
        folder.mkdir()
        self._folder = folder
        self.certificate, self._key = folder / "ca.pem", folder / "ca.key"
        _openssl(
            "req",
            "-x509",
            *_NEW,
            "-keyout",
            self._key,
            "-out",
            self.certificate,
            "-subj",
            f"/CN={folder.name}",
            "-days",
            1,
        )

    def issue(self, name: str, days: int = 1) -> tuple[Path, Path]:
        """The files of a new certificate and its key."""
        certificate, key, request = (self._folder / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        _openssl("req", *_NEW, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signed_by = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *signed_by, "-out", certificate, "-days", days)
        return certificate, key

    def tls(self, name: str, trusting: Authority | None = None) -> Tls:
        return Tls.load(*self.issue(name), (trusting or self).certificate)


_NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)
