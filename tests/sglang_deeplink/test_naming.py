"""What cached pages are called: as SGLang calls them, or as any engine with deeplink's store does."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from deeplink.kvconnector.prefixes import names as prefix_names
from sglang_deeplink import naming


class Key:
    """A key of SGLang's tree, whose tokens may be more than it has."""

    def __init__(self, tokens: list[int], length: int) -> None:
        self._tokens, self._length = array("q", tokens), length

    def raw_token_ids(self) -> array[int]:
        return self._tokens

    def __len__(self) -> int:
        return self._length


def original(token_ids: object, prior_hash: str | None, page_size: int | None) -> str:
    return "SGLang's own"


@pytest.fixture(autouse=True)
def _own() -> Iterator[None]:
    yield
    naming.use(0)


def test_without_the_store_names_are_sglangs_own() -> None:
    assert naming.hashes(original, [1, 2], None, 1) == "SGLang's own"


def test_names_are_those_of_kvconnector() -> None:
    naming.use(2)
    expected = prefix_names.pages(range(8), 4, 2)
    assert naming.hashes(original, list(range(8)), None, page_size=4) == expected
    assert naming.hashes(original, Key([*range(8), 99], 8), None, page_size=4) == expected
    assert naming.hashes(original, Key([4, 5, 6, 7], 4), expected[0], page_size=4) == expected[1:]


def test_what_is_not_pages_is_named_by_sglang() -> None:
    naming.use(2)
    assert naming.hashes(original, [1, 2]) == "SGLang's own"


@pytest.mark.parametrize(
    ("found", "wanted", "tree"), [("rust", True, "python"), ("python", True, "python"), ("rust", False, "rust")]
)
def test_the_tree_is_the_one_whose_names_can_be_given(
    monkeypatch: pytest.MonkeyPatch, found: str, wanted: bool, tree: str
) -> None:
    monkeypatch.setattr(naming, "_wanted", lambda: wanted)
    monkeypatch.setattr(naming, "_tree", "")
    assert naming.choose_tree(lambda name, params: found, "rust", SimpleNamespace()) == tree
    assert naming.tree() == tree
