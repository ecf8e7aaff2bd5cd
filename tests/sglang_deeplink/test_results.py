"""The first token, out of a request of SGLang and into SGLang's buffers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from stand_in import Rows

from deeplink.errors import Refused
from deeplink.kvconnector.handoffs.first_token import FirstToken
from sglang_deeplink import results

MOST = 8


def buffers() -> SimpleNamespace:
    wide = {"output_top_logprobs_val": MOST, "output_top_logprobs_idx": MOST}
    names = ("output_ids", "cached_tokens", "output_token_logprobs_val", "output_token_logprobs_idx", "bootstrap_room")
    return SimpleNamespace(**{name: Rows(wide.get(name, 16), -7.0) for name in (*names, *wide)})


def request(top: int | None = None) -> SimpleNamespace:
    logprob = SimpleNamespace(
        top_logprobs_num=top or 0,
        output_token_logprobs_val=[-0.5],
        output_top_logprobs_val=[[-0.5, -1.0]],
        output_top_logprobs_idx=[[17, 3]],
    )
    return SimpleNamespace(return_logprob=top is not None, logprob=logprob, output_ids=[17], cached_tokens=64)


def test_what_was_taken_is_put() -> None:
    first = results.taken(request(2))
    assert first == FirstToken(17, -0.5, ((17, -0.5), (3, -1.0)), 64)
    rows = buffers()
    results.put(rows, 2, 99, request(2), first)
    assert rows.output_ids.array[2, 0] == 17
    assert rows.cached_tokens.array[2].tolist() == [64] + [0] * 15
    assert rows.output_token_logprobs_val.array[2, 0] == -0.5
    assert rows.output_top_logprobs_idx.array[2, :2].tolist() == [17, 3]
    assert rows.bootstrap_room.array[2, 0] == 99
    assert all((tensor.array[[0, 1, 3]] == -7).all() for tensor in vars(rows).values())


def test_scores_are_taken_only_of_requests_that_want_them() -> None:
    assert results.taken(request()) == FirstToken(17, cached=64)


@pytest.mark.parametrize(
    ("top", "first"),
    [
        (0, FirstToken(17)),
        (2, FirstToken(17, -0.5, ((17, -0.5),))),
        (MOST + 1, FirstToken(17, -0.5, tuple((index, -1.0) for index in range(MOST + 1)))),
    ],
)
def test_scores_that_are_wanted_and_missing_are_refused(top: int, first: FirstToken) -> None:
    with pytest.raises(Refused) as refused:
        results.check(request(top), first, MOST)
    assert refused.value.field == "logprobs"


def test_and_those_that_are_there_are_not() -> None:
    results.check(request(), FirstToken(17), MOST)
    results.check(request(2), results.taken(request(2)), MOST)
