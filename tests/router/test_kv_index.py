"""The index beside a model that keeps every engine's blocks as they are, whatever is told in whatever order."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.router.kv_events import Cleared, Removed, Stored
from deeplink.router.kv_index import Index, chain

SIZE = 2
Prompt = tuple[int, ...]
prompts = st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE).map(tuple)
engines = st.sampled_from("abc")
steps = st.one_of(
    st.tuples(st.just("serve"), engines, prompts),
    st.tuples(st.just("evict"), engines, prompts),
    st.tuples(st.just("clear"), engines, st.just(())),
    st.tuples(st.just("leave"), engines, st.just(())),
)


class Model:
    """One engine: which blocks it holds, by their tokens and all before them. Its names are its own."""

    def __init__(self) -> None:
        self.names: dict[Prompt, int] = {}
        self.numbers = itertools.count()

    def serve(self, prompt: Prompt) -> list[Any]:
        events = []
        for end in range(SIZE, len(prompt) + 1, SIZE):
            block = prompt[:end]
            if block in self.names:
                continue
            parent = self.names.get(block[:-SIZE]) if end > SIZE else None
            if end > SIZE and parent is None:
                break
            self.names[block] = next(self.numbers)
            events.append(Stored((self.names[block],), parent, block[-SIZE:], SIZE, keyed=False))
        return events

    def evict(self, prompt: Prompt) -> list[Any]:
        gone = [block for block in self.names if block[: len(prompt)] == prompt]
        return [Removed(tuple(self.names.pop(block) for block in gone))] if gone else []

    def held(self, prompt: Prompt) -> int:
        count = 0
        while count + SIZE <= len(prompt) and prompt[: count + SIZE] in self.names:
            count += SIZE
        return count


@settings(deadline=None)
@given(st.lists(steps, max_size=40), prompts)
def test_the_index_says_what_the_engines_hold(told: list[Any], asked: Prompt) -> None:
    index, models = Index(), {name: Model() for name in "abc"}
    for name in models:
        index.follow(name)
        index.begin(name)
    for what, name, prompt in told:
        model = models[name]
        if what == "serve":
            index.apply(name, model.serve(prompt))
        elif what == "evict":
            index.apply(name, model.evict(prompt))
        else:
            models[name] = Model()
            if what == "leave":
                index.leave(name)
                index.follow(name)
                index.begin(name)
            else:
                index.apply(name, [Cleared()])
    found = index.held({SIZE: chain(asked, SIZE)})
    for name, model in models.items():
        assert not index.why(name)
        assert found.get(name, 0) == model.held(asked)
    for name in models:
        index.leave(name)
    assert not index._holders


def test_blocks_that_follow_one_that_was_never_told_make_it_inexact() -> None:
    index = Index()
    assert index.why("a")
    index.follow("a")
    index.begin("a")
    assert not index.why("a")
    index.apply("a", [Stored((2,), 1, (1, 2), SIZE, keyed=False)])
    assert "never told" in index.why("a")
    index.apply("a", [Cleared()])
    assert not index.why("a")


def test_blocks_with_more_than_tokens_and_those_after_them_are_nobodys() -> None:
    index = Index()
    index.follow("a")
    index.begin("a")
    index.apply("a", [Stored((1,), None, (1, 2), SIZE, keyed=True), Stored((2,), 1, (3, 4), SIZE, keyed=False)])
    assert index.held({SIZE: chain((1, 2, 3, 4), SIZE)}) == {"a": 0}
    assert not index.why("a")


def test_engines_with_other_block_sizes_are_looked_up_by_theirs() -> None:
    index = Index()
    for name, size in (("a", 2), ("b", 4)):
        index.follow(name)
        index.begin(name)
        index.apply(name, [Stored((1,), None, tuple(range(size)), size, keyed=False)])
    assert index.sizes == {2, 4}
    assert index.held({size: chain(range(4), size) for size in index.sizes}) == {"a": 2, "b": 4}


def test_a_block_that_is_told_again_is_counted_once() -> None:
    index = Index()
    index.follow("a")
    index.begin("a")
    block = Stored((1,), None, (1, 2), SIZE, keyed=False)
    index.apply("a", [block, block, Removed((1,))])
    assert index.held({SIZE: chain((1, 2), SIZE)}) == {"a": 0}
    assert not index._holders
