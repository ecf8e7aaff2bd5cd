"""A certificate for 127.0.0.1 that is its own CA."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path) -> dict[str, str]:
    """PEM files in `folder`: `certificate` and `key`."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    files = {"certificate": str(folder / "cert.pem"), "key": str(folder / "key.pem")}
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
    subprocess.run([*words, "-out", files["certificate"], "-keyout", files["key"]], check=True, capture_output=True)
    return files
