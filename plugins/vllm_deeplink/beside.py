"""Deeplink's connector beside another one of vLLM's, in a MultiConnector.

vLLM's MultiConnector asks its connectors in order and loads a request's prompt by the first that has some of it, so
deeplink's comes first: what is handed over is loaded, and verified, although the other may have a part of it too. Put
together by hand in another order it is right as well: a handoff that is not loaded lets its producer go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deeplink.errors import ConfigError
from vllm_deeplink import CONNECTOR

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

SEVERAL = "MultiConnector"
TESTED = ("OffloadingConnector",)
"""What deeplink is known to work beside."""


def settings(transfer: KVTransferConfig | None) -> dict[str, Any] | None:
    """The extra config of deeplink's connector, alone or among several; None where it is not."""
    if transfer is None:
        return None
    extra: dict[str, Any] = transfer.kv_connector_extra_config
    if transfer.kv_connector == CONNECTOR:
        return extra
    if transfer.kv_connector == SEVERAL:
        for child in extra.get("connectors", ()):
            if child.get("kv_connector") == CONNECTOR:
                found: dict[str, Any] = child.get("kv_connector_extra_config", {})
                return found
    return None


def both(ours: KVTransferConfig, other: KVTransferConfig) -> KVTransferConfig:
    """One config for deeplink's connector and the `other`. Raises ConfigError for one that this was not tried with."""
    from vllm.config import KVTransferConfig

    if other.kv_connector not in TESTED:
        raise ConfigError(
            f"--platform deeplink brings its own KV connector, which is not known to work beside {other.kv_connector}",
            field="kv-transfer-config",
            ours=", ".join(TESTED),
            theirs=str(other.kv_connector),
            remedy="leave one of the two out",
        )
    return KVTransferConfig(
        kv_connector=SEVERAL,
        kv_role=ours.kv_role,
        kv_load_failure_policy=ours.kv_load_failure_policy,
        kv_connector_extra_config={"connectors": [_child(ours), _child(other)]},
    )


def _child(one: KVTransferConfig) -> dict[str, Any]:
    child = {
        "kv_connector": one.kv_connector,
        "kv_role": one.kv_role or "kv_both",
        "kv_connector_extra_config": dict(one.kv_connector_extra_config),
    }
    if one.kv_connector_module_path is not None:
        child["kv_connector_module_path"] = one.kv_connector_module_path
    return child
