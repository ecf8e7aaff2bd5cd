"""deeplink: one LLM request across unlike accelerators."""

from deeplink.hookspecs import hookimpl

__all__ = ["__version__", "hookimpl"]
__version__ = "0.1.0"
