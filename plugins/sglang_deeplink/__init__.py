"""deeplink for SGLang: ``--disaggregation-mode prefill|decode --disaggregation-transfer-backend deeplink``.

This module is imported by every SGLang process, wanted or not, so it imports nothing but the standard library.

    hooks       everything that is patched in SGLang, and the versions it was tested with
    platform    the platform `deeplink`, which steps aside for the vendor's
    passage     how a ticket comes from a request's body to the scheduler
    prompt      what of a request its cache depends on, and what cannot be handed over
    adapter     SGLang's cache pool and model config -> cache, layout and contract
    probe       the proof, at start-up, that the declared layout is the real one
    process     one per scheduler process: the endpoint, and what has ended
    sender      one per request of a prefill engine
    receiver    one per request of a decode engine
    results     the first token, out of a request and into SGLang's buffers for it
    rooms       requests that another router than deeplink's has paired
    hicache     the storage backend of SGLang's hierarchical cache
    host_pool   the pool in host memory that it reads and writes
    naming      names of cached pages that do not depend on the page size
"""

from __future__ import annotations


def general_plugin() -> None:
    """Entry point `sglang.srt.plugins`: called in every process, and possibly more than once."""
    from sglang_deeplink import hooks

    hooks.install()


def platform_plugin() -> str | None:
    """Entry point `sglang.srt.platforms`: the name of a platform class, or None to step aside."""
    from sglang_deeplink import platform

    return platform.activate()
