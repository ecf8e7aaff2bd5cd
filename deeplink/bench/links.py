"""Handoffs over emulated links between two network namespaces. Linux, as root.

tcp from blocks of 64 tokens to blocks of 128, every tile verified, checksums on; MTU 9000. Inside is all that
`handoff.Pair.hand_over` says, so the gather of the first chunk and the landing of the last are not hidden by the wire.
The plain socket sends as many bytes from one buffer to one other.

`resume_resent` is about bytes: the link loses everything for two seconds in the middle of a handoff, and what the
prefill side's device has sent in all is compared with the same handoff without the cut. That counts what tcp itself
retransmits too. The worst round counts.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from deeplink.bench.engine import Shape
from deeplink.bench.handoff import Failed, Pair, pair
from deeplink.bench.marks import plain_socket
from deeplink.bench.netlink import DEVICE, Line, Namespace, Net, Unavailable, between
from deeplink.bench.rows import Row, Skipped
from deeplink.bench.scale import Scale
from deeplink.bench.timing import take_turns

LAYOUT = "block head token (kv dim)"
OURS, THEIRS = 64, 128
GOAL = 0.97
LINES = {
    "link_1gbit_reblock": Line(1000),
    "link_500mbit_10ms": Line(500, delay_ms=10),
    "link_500mbit_10ms_loss": Line(500, delay_ms=10, loss=0.005),
}
AT_LINE_RATE = {"link_1gbit_reblock": "link_1gbit_socket"}
"""The row whose mark is the line rate, and the row that says what of it a plain socket reaches."""
RESENT = "resume_resent"
CUT_SECONDS, RESENT_GOAL = 2.0, 0.1
ROWS = (*LINES, *AT_LINE_RATE.values(), RESENT)


def measure(wanted: Collection[str], scale: Scale) -> Iterator[Row | Skipped]:
    for name, line in LINES.items():
        names = [row for row in (name, AT_LINE_RATE.get(name, "")) if row in wanted]
        if names:
            try:
                yield from _speeds(names, name, line, scale)
            except Unavailable as exc:
                yield from (Skipped(row, str(exc)) for row in names)
    if RESENT in wanted:
        try:
            yield _resent(scale)
        except Unavailable as exc:
            yield Skipped(RESENT, str(exc))


def _speeds(wanted: list[str], name: str, line: Line, scale: Scale) -> Iterator[Row]:
    with between(line) as net, ExitStack() as stack:
        made = stack.enter_context(_pair(net, scale))
        run, other = stack.enter_context(plain_socket(made.bytes, net.b.address, net.a.entered(), net.b.entered()))
        best = take_turns({"socket": run, "handoff": made.hand_over}, scale.rounds, [made.there.pid, other.pid])
        speed = {label: found.per_second(made.bytes * 8 / 1e6) for label, found in best.items()}
        breakdown = made.breakdown()
        cost, plain_cost = (best[label].cpu / made.bytes * 1e9 for label in ("handoff", "socket"))
        if name in AT_LINE_RATE:
            mark, of, mark_cost = "line rate", line.rate_mbit, None
            rows = [Row(AT_LINE_RATE[name], speed["socket"], "Mbit/s", mark, of, cpu_s_per_gb=plain_cost)]
        else:
            mark, of, mark_cost, rows = "plain socket", speed["socket"], plain_cost, []
        row = Row(name, speed["handoff"], "Mbit/s", mark, of, GOAL, "at least", "ratio", cost, mark_cost, breakdown)
        rows.insert(0, row)
        yield from (row for row in rows if row.name in wanted)


def _pair(net: Net, scale: Scale) -> AbstractContextManager[Pair]:
    ours = Shape(LAYOUT, OURS, scale.link_tokens, host=net.a.address)
    theirs = Shape(LAYOUT, THEIRS, scale.link_tokens, host=net.b.address)
    return pair(ours, theirs, net.a.entered(), net.b.entered())


def _resent(scale: Scale) -> Row:
    with between(Line(500, relayed=True)) as net, _pair(net, scale) as made:

        def sent(cut_after: float | None) -> tuple[int, float]:
            before = _sent(net.a)
            timer = threading.Timer(cut_after, net.cut, [CUT_SECONDS]) if cut_after else None
            if timer is not None:
                timer.start()
            seconds = made.hand_over()
            return _sent(net.a) - before, seconds

        worst, longest = 0.0, 0.0
        for _ in range(scale.rounds):
            plain, seconds = sent(None)
            with_cut, cut_seconds = sent(seconds / 2)
            if cut_seconds < seconds + CUT_SECONDS / 2:
                raise Failed(f"the cut of {CUT_SECONDS:g} s was not in the middle of the handoff: {cut_seconds:.1f} s")
            worst, longest = max(worst, with_cut - plain), max(longest, cut_seconds)
        made.check()
        return Row(
            RESENT,
            worst / 1e6,
            "MB",
            "bytes of the handoff",
            made.bytes / 1e6,
            RESENT_GOAL,
            note=f"with the cut {longest:.1f} s, without {seconds:.1f} s",
        )


def _sent(namespace: Namespace) -> int:
    """Bytes that the device of this end has sent so far, headers and retransmissions included."""
    with namespace.entered():
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            device, _, figures = line.partition(":")
            if device.strip() == DEVICE:
                return int(figures.split()[8])
    raise Unavailable(f"no device {DEVICE}")
