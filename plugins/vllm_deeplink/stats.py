"""What handoffs have done, through vLLM's own metrics: its ``/metrics`` and its log.

The halves of the connector are asked for it once per engine step, and answer with what has happened since the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from deeplink.kvconnector.handoffs.tally import Tally, added

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENDED, BLOCKS = "ended", "blocks"

_BY_SIDE: tuple[tuple[str, str, Callable[[Tally], float]], ...] = (
    ("kv_bytes", "Bytes of KV cache that handoffs have moved.", lambda tally: tally.kv_bytes),
    ("tokens", "Tokens that they have moved.", lambda tally: tally.tokens),
    ("kv_early_bytes", "Bytes that were sent off before prefill had ended.", lambda tally: tally.early),
    ("converting_seconds", "Seconds spent on taking cache out of blocks or into them.", lambda tally: tally.converting),
    ("resumed", "Times that a handoff went on after a broken link.", lambda tally: tally.resumed),
)


class DeepLinkStats(KVConnectorStats):
    """`data` is what crosses processes: tallies as builtins, and how many blocks handoffs hold where that has
    changed."""

    @classmethod
    def of(cls, ended: Iterable[Tally] = (), blocks: int | None = None) -> DeepLinkStats:
        return cls(data={ENDED: [msgspec.to_builtins(tally) for tally in ended], BLOCKS: blocks})

    @property
    def ended(self) -> list[Tally]:
        return tallies(self.data)

    @property
    def blocks(self) -> int | None:
        return self.data.get(BLOCKS)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: DeepLinkStats) -> DeepLinkStats:
        blocks = self.blocks if other.blocks is None else other.blocks
        return DeepLinkStats.of(added(self.ended, other.ended), blocks)

    def reduce(self) -> dict[str, int | float]:
        """For the log: how many ended in which way, and what they moved."""
        found: dict[str, int | float] = {}
        for tally in self.ended:
            name = f"{tally.side} {tally.state}" + (f" ({tally.code})" if tally.code else "")
            found[name] = tally.count
        moved = sum(tally.kv_bytes for tally in self.ended)
        return {**found, "MB of KV": round(moved / 1e6, 1)} if found else found

    def is_empty(self) -> bool:
        return not self.data.get(ENDED) and self.blocks is None


def tallies(data: dict[str, Any]) -> list[Tally]:
    return msgspec.convert(data.get(ENDED, []), list[Tally])


class DeepLinkPromMetrics(KVConnectorPromMetrics):
    """Counters named ``vllm:deeplink_…``, with vLLM's labels and those of docs/metrics.md."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        counter, gauge = metric_types[Counter], metric_types[Gauge]

        def counts(name: str, help_: str, *labels: str) -> Any:
            return counter(name=f"vllm:deeplink_{name}", documentation=help_, labelnames=[*labelnames, *labels])

        self._handoffs = counts("handoffs", "Handoffs that have ended, by how and why.", "side", "state", "code")
        self._seconds = counts("handoff_seconds", "Seconds from opening or claim to the end.", "side", "state")
        self._by_side = [(counts(name, help_, "side"), value) for name, help_, value in _BY_SIDE]
        self._held = gauge(
            name="vllm:deeplink_blocks_held",
            documentation="Blocks that wait to be staged or are being loaded into.",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self._engines[engine_idx]
        for tally in tallies(transfer_stats_data):
            self._handoffs.labels(*engine, tally.side, tally.state, tally.code).inc(tally.count)
            self._seconds.labels(*engine, tally.side, tally.state).inc(tally.seconds)
            for metric, value in self._by_side:
                metric.labels(*engine, tally.side).inc(value(tally))
        if (blocks := transfer_stats_data.get(BLOCKS)) is not None:
            self._held.labels(*engine).set(blocks)
