"""Plugins for tests: real modules with real metadata, found by this process and by those that it starts."""

from __future__ import annotations

import textwrap
from pathlib import Path


def install(folder: Path, name: str, source: str) -> None:
    """A distribution ``NAME-plugin 1.2`` with one module `name`, which is a plugin of deeplink. `folder` is on the
    path."""
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    meta = folder / f"{name}_plugin-1.2.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.2\n")
    (meta / "entry_points.txt").write_text(f"[deeplink]\n{name} = {name}\n")


TRANSPORT = """
import os
from deeplink import hookimpl
from deeplink.kvconnector.transport.tcp import TcpTransport

class Wrapped:
    def __init__(self, link):
        self.close = link.close

class Other(TcpTransport):
    name = "other"

    def __init__(self, host, secret):
        super().__init__(host, secret)

{body}

@hookimpl
def deeplink_register_transports(register):
    register("other", Other)
"""


def transport(body: str) -> str:
    """The source of a plugin whose transport `other` is tcp with these methods instead."""
    return TRANSPORT.format(body=textwrap.indent(textwrap.dedent(body), "    "))
