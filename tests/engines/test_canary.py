"""The doctor's canary on real engines: it sees nothing where nothing is wrong, and a cache that is."""

from __future__ import annotations

from fleet import Pair, Running, quiet

from deeplink.doctor import canary, subject
from deeplink.doctor.model import Finding


def fly(pair: Pair, *running: Running) -> Finding:
    file = pair.fleet.folder / "canary.toml"
    names = [(f'[[engines]]\nname = "{one.engine.name}"\nurl = "{one.url}"\n') for one in running]
    file.write_text("".join(names))
    (found,) = canary.examine(subject.gather(file, subject.Effort(1 << 20, 10)), running[0].engine.name).findings
    quiet(*running)
    return found


def test_a_good_pair(pair: Pair) -> None:
    found = fly(pair, pair.prefill, pair.decode)
    assert (found.name, found.standing) == ("prefill -> decode", "works"), found
    worst = max(*found.facts["from_decode"], *found.facts["from_prefill"], *found.facts["apart"])
    assert worst <= canary.FLOORS["float32"] / 3


def test_a_cache_without_v(pair: Pair, unlike: tuple[Running, Running]) -> None:
    """The decode engine compares no digests, so the handoff ends well and only the answer tells."""
    _, careless = unlike
    pair.fleet.fault.write_text("zero-v")
    try:
        found = fly(pair, pair.prefill, careless)
    finally:
        pair.fleet.fault.write_text("")
    assert found.standing == "failed", found
    assert found.reason is not None
    assert found.reason.field == "log-probability"
