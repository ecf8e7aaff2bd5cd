"""The scheduler half, as vLLM's scheduler calls it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_vllm import MODULES
from stages import Stages

from deeplink.errors import Refused
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.handoff import BEGUN, COMPLETE, NOT_BEGUN
from deeplink.kvconnector.handoffs.ticket import Ticket
from vllm_deeplink.early import EarlyClaims

SECRET = b"a secret for the tests only, 32b"
OURS = ("vllm_deeplink.scheduler", "vllm_deeplink.orders", "vllm_deeplink.stats")


@pytest.fixture
def scheduler(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, on a made vLLM, and both gone afterwards."""
    before = {name: sys.modules[name] for name in sys.modules if name.split(".")[0] == "vllm" or name in OURS}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    for path, text in MODULES.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    importlib.invalidate_caches()
    yield importlib.import_module("vllm_deeplink.scheduler")
    for name in list(sys.modules):
        if name.split(".")[0] == "vllm" or name in OURS:
            del sys.modules[name]


@dataclass
class Request:
    """Of vLLM's, what the half reads."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    status: Any = None
    cache_salt: str | None = None
    prompt_embeds: Any = None
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(range(self.num_prompt_tokens))


class Blocks:
    def __init__(self, *tables: list[int]) -> None:
        self._tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self._tables


class Half:
    """A half of an engine with 40 blocks of 16 tokens, and what its prefills are said to have come to."""

    def __init__(self, module: Any) -> None:
        self.stages = Stages()
        self.claims = EarlyClaims(self.stages, lambda: 40, (16,), 160)
        self.half = module.SchedulerHalf(SECRET, "c", self.claims)
        self.status = importlib.import_module("vllm.v1.request").RequestStatus

    def consuming(self, name: str, tokens: int = 100, *, early: bool = True, consumer: str = "c") -> Request:
        ticket = tickets.mint(Ticket(name, "p", consumer, ("127.0.0.1:1",), 60_000), SECRET)
        part = {"side": "consume", "ticket": ticket, **({"early": True} if early else {})}
        return Request(name, tokens, {"deeplink": part})

    def producing(self, name: str, tokens: int) -> Request:
        ticket = tickets.mint(Ticket(name, "p", "c", ("127.0.0.1:1",), 60_000), SECRET)
        return Request(name, tokens, {"deeplink": {"side": "produce", "ticket": ticket}})

    def step(self, *, new: Any = (), cached: Any = (), scheduled: Any = None, preempted: Any = ()) -> Any:
        return self.half.step(
            SimpleNamespace(
                preempted_req_ids=set(preempted),
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=name, block_ids=tables, num_computed_tokens=computed)
                    for name, tables, computed in new
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[name for name, *_ in cached],
                    new_block_ids=[tables for _, tables, *_ in cached],
                    num_computed_tokens=[computed for *_, computed, _ in cached],
                    resumed_req_ids={name for name, *_, resumed in cached if resumed},
                ),
                num_scheduled_tokens=scheduled or {},
            )
        )


@pytest.fixture
def half(scheduler: Any) -> Half:
    return Half(scheduler)


def test_a_claim_after_prefill_asks_nobody(half: Half) -> None:
    request = half.consuming("a", early=False)
    assert half.half.match(request, 16) == (83, True)
    half.half.allocated(request, Blocks([1, 2, 3, 4, 5, 6, 7]), 83)
    (order,) = half.step().loads
    assert (order.start, order.stop, order.tables) == (16, 99, ((1, 2, 3, 4, 5, 6, 7),))
    assert half.stages.forgotten == []


def test_an_early_claim_is_put_off_and_has_nothing_meanwhile(half: Half) -> None:
    request = half.consuming("a")
    assert half.half.match(request, 0) == (None, False)
    assert (half.half.stats(), half.step().loads) == (None, [])
    half.stages.stages["a"] = BEGUN
    assert half.half.match(request, 0) == (99, True)
    half.half.allocated(request, Blocks(list(range(1, 8))), 99)
    (order,) = half.step().loads
    assert 1 <= order.ticket.milliseconds <= 60_000
    assert order.ticket_text == request.kv_transfer_params["deeplink"]["ticket"]  # type: ignore[index]
    assert half.claims.held == 7
    half.half.reported(SimpleNamespace(finished_sending=None, finished_recving={"a"}))
    assert half.claims.held == 0


def test_early_claims_pass_each_other_within_the_bound(half: Half) -> None:
    requests = [half.consuming(name, 160) for name in "abc"]
    half.stages.stages.update(dict.fromkeys("abc", BEGUN))
    assert [half.half.match(request, 0)[0] for request in requests] == [159, 159, None]
    half.stages.stages["c"] = COMPLETE
    assert half.half.match(requests[2], 0) == (159, True)


@pytest.mark.parametrize("stage", [NOT_BEGUN, BEGUN])
def test_one_that_is_given_up_while_it_is_put_off_or_loads(half: Half, stage: int) -> None:
    request = half.consuming("a")
    half.stages.stages["a"] = stage
    matched, _ = half.half.match(request, 0)
    if matched is not None:
        half.half.allocated(request, Blocks([1]), matched)
    request.status = half.status.FINISHED_ABORTED
    assert half.half.finished(request) is False
    orders = half.step()
    assert [order.ticket.handoff for order in orders.cancels] == (["a"] if stage == BEGUN else [])
    assert half.claims.held == 0
    assert "a" in half.stages.forgotten


def test_a_refused_one_is_refused_at_once_also_when_it_comes_early(half: Half) -> None:
    request = half.consuming("a", consumer="another epoch")
    assert half.half.match(request, 0) == (99, True)
    half.half.allocated(request, Blocks([1, 2]), 99)
    (deny,) = half.step().denies
    assert (deny.request, deny.reason.field) == ("a", "epoch")


def test_an_early_claim_of_which_all_is_cached_lets_the_producer_go(half: Half) -> None:
    request = half.consuming("a")
    assert half.half.match(request, 99) == (0, False)
    (order,) = half.step().loads
    assert (order.request, order.start, order.stop) == ("", 0, 0)


@pytest.mark.parametrize("early", [False, True])
def test_another_connector_loads_the_prompt(half: Half, early: bool) -> None:
    """vLLM's MultiConnector asks all and takes the first that has something; the others are told of no tokens."""
    request = half.consuming("a", early=early)
    half.stages.stages["a"] = BEGUN
    assert half.half.match(request, 0) == (99, True)
    half.half.allocated(request, Blocks([1, 2]), 0)
    (order,) = half.step().loads
    assert (order.request, order.start, order.stop) == ("", 0, 0)
    assert half.claims.held == 0
    assert half.half.match(request, 0) == (0, False)  # after a preemption: it has been tried


def test_another_connector_loads_the_prompt_of_a_refused_handoff(half: Half) -> None:
    request = half.consuming("a", consumer="another epoch")
    half.half.match(request, 0)
    half.half.allocated(request, Blocks([1]), 0)
    orders = half.step()
    assert (orders.loads, orders.denies) == ([], [])


def test_fills_are_of_what_was_computed(half: Half) -> None:
    request = half.producing("a", 100)
    assert half.half.match(request, 0) == (0, False)
    first = half.step(new=[("a", ([1, 2, 3, 4],), 0)], scheduled={"a": 64})
    assert [(fill.tables, fill.computed) for fill in first.fills] == [(((1, 2, 3, 4),), 64)]
    assert [(one.request, one.tokens) for one in first.opens] == [("a", 100)]
    second = half.step(cached=[("a", ([5, 6, 7],), 64, False)], scheduled={"a": 36})
    assert [(fill.tables, fill.computed) for fill in second.fills] == [(((1, 2, 3, 4, 5, 6, 7),), 100)]
    assert half.step(cached=[("a", None, 100, False)], scheduled={"a": 1}).fills == []


def test_what_goes_past_the_prompt_is_not_taken_for_its_end(half: Half) -> None:
    """A request that was preempted after its prompt is computed again past it: a state is then not that of the prompt,
    and the producer, which knows what is a state, has to be told the number as it is."""
    request = half.producing("a", 100)
    half.half.match(request, 0)
    half.step(new=[("a", ([1, 2, 3, 4, 5, 6, 7],), 0)], scheduled={"a": 64})
    assert half.step(preempted=["a"]).lost == ["a"]
    orders = half.step(cached=[("a", ([1, 2, 3, 4, 5, 6, 7],), 0, True)], scheduled={"a": 103})
    assert [fill.computed for fill in orders.fills] == [103]
    assert orders.opens == []


def other_weights() -> Refused:
    return Refused("the weights may be others", field="model.weights")


def test_nothing_is_offered_once_the_weights_may_be_others(half: Half) -> None:
    """Of what is under way, a prompt that is prefilled is still that of the old ones."""
    for name in ("waiting", "part", "whole"):
        half.half.match(half.producing(name, 100), 0)
    new = [("part", ([1, 2, 3, 4],), 0), ("whole", ([5, 6, 7, 8, 9, 10, 11],), 0)]
    half.step(new=new, scheduled={"part": 64, "whole": 100})
    half.half.withdraw(other_weights())
    half.half.match(half.producing("later", 100), 0)
    orders = half.step(
        new=[("waiting", ([20],), 0), ("later", ([21],), 0)],
        cached=[("part", ([12, 13, 14],), 64, False)],
        scheduled={"waiting": 100, "later": 100, "part": 36},
    )
    assert (orders.opens, orders.fills, orders.aborts) == ([], [], ["part"])
    assert [(one.handoff, one.reason.field) for one in orders.withheld] == [
        ("waiting", "model.weights"),
        ("later", "model.weights"),
    ]
    # What is computed anew for a prompt that lost its blocks is of other weights than the part that was staged.
    orders = half.step(preempted=["whole"])
    assert (orders.lost, orders.aborts) == (["whole"], ["whole"])
    orders = half.step(cached=[("whole", ([5],), 0, True)], scheduled={"whole": 100})
    assert orders.fills == []


def test_nothing_is_loaded_once_the_weights_may_be_others(half: Half) -> None:
    loading, matched, put_off = (half.consuming(name, early=name == "put off") for name in ("b", "m", "put off"))
    assert half.half.match(loading, 0) == (99, True)
    half.half.allocated(loading, Blocks([1, 2]), 99)
    assert half.half.match(matched, 0) == (99, True)
    assert half.half.match(put_off, 0) == (None, False)
    assert len(half.step().loads) == 1
    half.half.withdraw(other_weights())
    later = half.consuming("later", early=False)
    for request in (matched, put_off, later):
        assert half.half.match(request, 0) == (99, True)
        half.half.allocated(request, Blocks([3]), 99)
    orders = half.step()
    assert [order.ticket.handoff for order in orders.cancels] == ["b"]
    assert [(deny.request, deny.reason.field) for deny in orders.denies] == [
        ("m", "model.weights"),
        ("put off", "model.weights"),
        ("later", "model.weights"),
    ]
    assert orders.loads == []
