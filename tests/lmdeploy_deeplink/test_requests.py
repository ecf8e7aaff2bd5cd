"""What of a request a handoff depends on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deeplink.errors import Refused
from deeplink.kvconnector.handoffs.first_token import FirstToken
from lmdeploy_deeplink.migration import requests


class Multimodals(list[Any]):
    def empty(self) -> bool:
        return not self


def sequence(**more: Any) -> Any:
    fields = {"adapter_name": None, "history_multimodals": Multimodals(), "history_embeddings": [], **more}
    fields.setdefault("sampling_param", SimpleNamespace(response_format=None))
    return SimpleNamespace(**fields)


def test_an_adapter_is_part_of_the_prompt() -> None:
    assert requests.identity(sequence()) == []
    assert requests.identity(sequence(adapter_name="a")) == ["lora=a"]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"history_multimodals": Multimodals([1])}, "media"),
        ({"history_embeddings": [1]}, "media"),
        ({"sampling_param": SimpleNamespace(response_format={"type": "json_object"})}, "response_format"),
    ],
)
def test_what_is_not_handed_over_is_refused_by_name(more: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as caught:
        requests.identity(sequence(**more))
    assert caught.value.field == field


def test_the_first_token_goes_with_its_log_probabilities_and_comes_back() -> None:
    assert requests.first_token(5, None) == requests.first_token(5, []) == FirstToken(5)
    first = requests.first_token(5, [([-0.5, -0.25, -0.5], [5, 9, 5])])
    assert first == FirstToken(5, -0.5, ((9, -0.25), (5, -0.5)))
    assert requests.logprobs(SimpleNamespace(num_logprobs=1), first) == [{5: -0.5, 9: -0.25}]
    assert requests.logprobs(SimpleNamespace(num_logprobs=0), FirstToken(5)) is None


@pytest.mark.parametrize("first", [FirstToken(5), FirstToken(5, -0.5, ((5, -0.5),))])
def test_more_than_has_come_is_refused(first: FirstToken) -> None:
    with pytest.raises(Refused) as caught:
        requests.logprobs(SimpleNamespace(num_logprobs=2), first)
    assert caught.value.field == "logprobs"


@pytest.mark.parametrize(
    ("most", "stops", "last"), [(1, [], True), (2, [], False), (2, [7], True), (2, [8], False), (0, [], True)]
)
def test_an_answer_that_ends_with_its_first_token(most: int, stops: list[int], last: bool) -> None:
    assert requests.is_last(SimpleNamespace(max_new_tokens=most, stop_words=stops), 7) is last
