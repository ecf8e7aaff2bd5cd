"""Emulated links, which `deeplink bench` has too."""

from deeplink.bench.netlink import Line, Namespace, Net, Unavailable, between, identity

__all__ = ["Line", "Namespace", "Net", "Unavailable", "between", "identity"]
