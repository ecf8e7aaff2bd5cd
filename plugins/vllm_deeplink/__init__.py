"""deeplink for vLLM: ``vllm serve MODEL --platform deeplink --deeplink-role prefill|decode|both``.

This module is imported by every vLLM process, wanted or not, so it imports nothing but the standard library.

    flags       the ways to ask for it, put into vLLM's
    asked       what was asked for, and what that turns into
    beside      its connector, beside another one
    platform    the platform vLLM runs on, which stays what it is
    vendors     vendors' platform plugins, and what is wrong with them
    supported   the settings of vLLM's that cannot be handed over with
    connector   vLLM's connector base class, split into
    scheduler     the half in the engine-core process: which request hands over what
    early         when a claim that comes before its cache may have blocks
    worker        the half in the process that holds the cache
    orders      what the scheduler half tells the worker half each step
    termination the signal that ends an engine
    identity    which prompt a request is
    changes     calls that give a running engine other weights
    stats       what has happened, through vLLM's own metrics
    versions    what each version of vLLM has of its own, and which of them runs here
    adapter     vLLM's cache tensors and model config -> cache, layout and contract
    layouts     which of the catalogue's layouts an attention backend uses
    probe       the proof, at start-up, that the declared layout is the real one
"""

from __future__ import annotations

CONNECTOR = "DeepLinkConnector"


def general_plugin() -> None:
    """Entry point `vllm.general_plugins`: called in every process, and possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_deeplink import flags

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "vllm_deeplink.connector", CONNECTOR)
    flags.install()


def platform_plugin() -> None:
    """Entry point `vllm.platform_plugins`: offers no platform, ever. Called when vLLM looks for one."""
    from vllm_deeplink import platform

    platform.explain()
