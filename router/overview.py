"""All that the web page shows, as one document."""

from __future__ import annotations

from collections import Counter
from typing import Any

from deeplink.router.admission import Admission
from deeplink.router.fleet import Fleet
from deeplink.router.recent import WINDOW, Recent, percentile


def overview(fleet: Fleet, admission: Admission, recent: Recent) -> dict[str, Any]:
    """`flows` are the pairs that may hand over, that do now, or that have; times are in seconds."""
    engines, shut, load = fleet.table.engines, admission.shut(), admission.load
    live = list(recent.live.values())
    moving: Counter[tuple[str, str]] = Counter((one.prefill, one.decode) for one in live if one.handoff)
    phases = Counter(one.phase for one in live)
    pairs = {(pair.prefill.name, pair.decode.name) for pair in fleet.table.pairs} | moving.keys() | recent.flows.keys()
    lately = recent.lately()
    firsts, wholes = [one.first for one in lately if one.first], [one.whole for one in lately]
    return {
        "engines": [
            {
                "name": engine.name,
                "kind": engine.kind,
                "role": engine.role or "unknown",
                "chip": engine.contract.chip if engine.contract else engine.settings.get("chip", "unknown"),
                "state": _state(engine.down, engine.name in shut),
                "why": engine.down or (shut[engine.name].why if engine.name in shut else ""),
                "kv_use": round(fleet.use(engine.name), 4),
                "requests": load.of(engine.name).requests,
                "prefill_tokens": load.of(engine.name).prefill,
                "decode_tokens": load.of(engine.name).decode,
            }
            for engine in engines
        ],
        "flows": [
            {"prefill": one, "decode": other, "live": moving[one, other], "done": recent.flows[one, other]}
            for one, other in sorted(pairs)
        ],
        "phases": dict(phases),
        "queue": len(admission.queue),
        "window": WINDOW,
        "requests": len(lately),
        "failed": sum(one.status.startswith("5") for one in lately),
        "first_byte": {"p50": percentile(firsts, 0.5), "p99": percentile(firsts, 0.99)},
        "whole": {"p50": percentile(wholes, 0.5), "p99": percentile(wholes, 0.99)},
        "ends": dict(recent.ends),
    }


def _state(down: str, shut: bool) -> str:
    return "down" if down else "no new requests" if shut else "up"
