"""Emulated links, which `deeplink bench` has too."""

from deeplink.bench.netlink import Line, Namespace, Net, Unavailable, between

__all__ = ["Line", "Namespace", "Net", "Unavailable", "between"]
