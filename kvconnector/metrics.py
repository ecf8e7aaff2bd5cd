"""What an engine has done and is doing, as text in the format of Prometheus.

The numbers come from the engine's ranks, each with its own label. The registry is made for each answer and holds
nothing but them: the process-wide one belongs to the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.handoffs.channel import Answer
from deeplink.kvconnector.handoffs.tally import SECONDS, Half, Tally

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES: tuple[tuple[str, str, Callable[[Half], int]], ...] = (
    ("deeplink_handoffs_open", "Handoffs that have begun and not ended.", lambda half: half.handoffs),
    ("deeplink_claims", "Claims that are being served or loaded, or may come back.", lambda half: half.claims),
    ("deeplink_staging_capacity_bytes", "Staging memory of one direction.", lambda half: half.capacity),
    ("deeplink_staging_used_bytes", "Staging memory that is in use.", lambda half: half.used),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Tally], float]], ...] = (
    ("deeplink_tokens", "Tokens that handoffs have moved, over all that ended.", lambda tally: tally.tokens),
    ("deeplink_kv_bytes", "Bytes of KV cache that they have moved.", lambda tally: tally.kv_bytes),
    ("deeplink_kv_early_bytes", "Bytes that were sent off before prefill had ended.", lambda tally: tally.early),
    (
        "deeplink_converting_seconds",
        "Seconds spent on taking KV cache out of blocks or putting it into them.",
        lambda tally: tally.converting,
    ),
    ("deeplink_resumed", "Times that a handoff went on after a broken link.", lambda tally: tally.resumed),
)


def render(contract: Contract, answers: Sequence[Answer | None], blocks: tuple[int, int]) -> bytes:
    """`answers` are those of the contract's ranks, None where there was none; `blocks` are the engine's, all of them
    and those that are held."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(contract, answers, blocks))
    return generate_latest(registry)


class _Numbers(Collector):
    def __init__(self, contract: Contract, answers: Sequence[Answer | None], blocks: tuple[int, int]) -> None:
        self._contract = contract
        self._ranks = [(str(place), answer) for place, answer in enumerate(answers)]
        self._there = [(place, answer) for place, answer in self._ranks if answer is not None]
        self._blocks = blocks

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        for name, help_, of_half in _GAUGES:
            yield _family(GaugeMetricFamily, name, help_, ["rank", "side"], self._halves(of_half))
        by = ["rank", "side", "state", "code"]
        ended = (((rank, t.side, t.state, t.code), t.count) for rank, answer in self._there for t in answer.tallies)
        yield _family(CounterMetricFamily, "deeplink_handoffs", "Handoffs that have ended, by how and why.", by, ended)
        for name, help_, of_tally in _COUNTERS:
            yield _family(CounterMetricFamily, name, help_, ["rank", "side"], self._sums(of_tally))
        late = (((rank,), answer.late) for rank, answer in self._there)
        help_ = "Notices that were ignored because their handoff had ended."
        yield _family(CounterMetricFamily, "deeplink_late_notices", help_, ["rank"], late)
        yield self._seconds()

    def _engine(self) -> Iterator[Metric]:
        contract = self._contract
        names = ("engine", "engine_version", "chip", "role", "epoch")
        yield InfoMetricFamily("deeplink_engine", "This engine.", {name: getattr(contract, name) for name in names})
        yield GaugeMetricFamily("deeplink_blocks", "Blocks of the engine's KV cache.", self._blocks[0])
        yield GaugeMetricFamily("deeplink_blocks_held", "Blocks that requests hold.", self._blocks[1])
        up = (((rank,), int(answer is not None)) for rank, answer in self._ranks)
        yield _family(GaugeMetricFamily, "deeplink_rank_up", "Whether a rank answers.", ["rank"], up)

    def _halves(self, value: Callable[[Half], int]) -> Iterator[tuple[tuple[str, ...], int]]:
        for rank, answer in self._there:
            for side, half in answer.halves.items():
                yield (rank, side), value(half)

    def _sums(self, value: Callable[[Tally], float]) -> Iterable[tuple[tuple[str, ...], float]]:
        sums: defaultdict[tuple[str, ...], float] = defaultdict(int)
        for rank, answer in self._there:
            for tally in answer.tallies:
                sums[rank, tally.side] += value(tally)
        return sums.items()

    def _seconds(self) -> Metric:
        help_ = "From a handoff's opening or claim to its end."
        family = HistogramMetricFamily("deeplink_handoff_seconds", help_, labels=["rank", "side", "state"])
        sums: dict[tuple[str, str, str], tuple[float, list[int]]] = {}
        for rank, answer in self._there:
            for tally in answer.tallies:
                seconds, classes = sums.get((rank, tally.side, tally.state), (0.0, [0] * len(tally.classes)))
                added = [a + b for a, b in zip(classes, tally.classes, strict=True)]
                sums[rank, tally.side, tally.state] = seconds + tally.seconds, added
        edges = [*map(str, SECONDS), "+Inf"]
        for labels, (seconds, classes) in sums.items():
            family.add_metric(labels, list(zip(edges, accumulate(classes), strict=True)), seconds)
        return family


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help_: str,
    labels: Sequence[str],
    values: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    family = kind(name, help_, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family
