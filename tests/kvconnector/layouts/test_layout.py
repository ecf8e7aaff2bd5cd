"""The notation: what it accepts, what it means, and where it says a text is wrong."""

from __future__ import annotations

import contextlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_layouts import Sized, layouts

from deeplink.errors import LayoutError
from deeplink.kvconnector.layouts.layout import Layout, Strided
from deeplink.kvconnector.layouts.notation import AXES, MAX_TEXT, Axis, Fused, Split

FOUR = "block head token"


@given(layouts())
def test_text_to_layout_and_back(sized: Sized) -> None:
    parsed = Layout.parse(sized.text)
    assert str(parsed) == sized.text
    assert Layout.parse(str(parsed)) == parsed


@given(layouts(), st.sampled_from([" ", "  ", "\t", "\n "]))
def test_space_means_nothing(sized: Sized, space: str) -> None:
    loose = space + sized.text.replace(" ", space).replace("(", f"({space}").replace(")", f"{space})") + space
    assert Layout.parse(loose) == Layout.parse(sized.text)


@given(layouts())
def test_strides_are_where_the_reference_says(sized: Sized) -> None:
    bound = sized.bind()
    expected = sized.addresses()
    before = [0, *itertools.accumulate(sized.tensors)]
    seen = 0
    for strided in bound.sides:
        dims = math.prod(factor.extent for factor in strided.of("dim"))
        for at in itertools.product(*(range(size) for size in expected.shape[1:-1]), range(dims)):
            where = (strided.kv, *at[:-1], strided.first_dim + at[-1])
            assert before[strided.tensor] + _address(strided, at) == expected[where]
            seen += 1
    # Each element has a place of its own, and together they fill the tensors.
    assert sorted(expected.reshape(-1)) == list(range(seen))
    assert seen == bound.blocks * bound.block_elements == sum(sized.tensors)
    assert [bound.elements(tensor) for tensor in range(bound.tensors)] == sized.tensors
    assert bound.kv == sized.kv


def _address(strided: Strided, at: tuple[int, ...]) -> int:
    values = dict(zip(("block", "head", "token", "dim"), at, strict=True))
    return strided.offset + sum(f.stride * (values[f.axis] // f.unit % f.extent) for f in strided.factors)


def test_items() -> None:
    assert Layout.parse("block token head (kv dim)").items == (
        Axis("block"),
        Axis("token"),
        Axis("head"),
        Fused((Axis("kv"), Axis("dim"))),
    )
    parsed = Layout.parse("block head (k: dim/4 token dim%4 | v: token dim)")
    assert parsed.items[2] == Split(
        (Axis("dim", "/", 4), Axis("token"), Axis("dim", "%", 4)), (Axis("token"), Axis("dim"))
    )


def test_a_parenthesis_means_the_same_as_none() -> None:
    sizes = {"heads": 2, "head_dim": 4, "block_size": 8, "blocks": 3}
    assert Layout.parse("block token head (kv dim)").bind(**sizes) == Layout.parse("block token head kv dim").bind(
        **sizes
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "block must appear once.*nothing"),
        ("block head token kv dim page", "'page' is not an axis.*at character 24"),
        ("block  page", "'page' is not an axis.*at character 7"),
        ("block slot head kv dim", "block must appear once.*k has block block"),
        ("slot%2 head kv dim", "block must appear once"),
        ("block token kv dim", "head must appear once"),
        ("block token head dim", "kv must appear once"),
        ("block token", "dim must appear once"),
        ("kv | block token head kv dim", r"kv cannot appear after 'kv \|'"),
        ("kv | block token dim", "head must appear once"),
        ("kv |", "block must appear once"),
        ("kv/2 | slot head dim", "kv cannot be factored at character 0"),
        ("block | slot head dim", r"'\|' is not an axis"),
        ("dim 4+4 | block token head dim", r"head cannot appear after 'dim 4\+4 \|'"),
        ("dim 4+4 | kv block token dim", r"kv cannot appear after 'dim 4\+4 \|'"),
        ("dim 4+4 | block token (k: dim | v: dim)", "kv cannot appear after"),
        ("dim 4+4 block token dim", r"'4\+4' is not an axis"),
        ("dim/2 4+4 | block token dim", "a dim in parts cannot be factored"),
        ("dim 4+0 | block token dim", "cannot read from character 3"),
        ("dim 4 | block token dim", "cannot read from character 3"),
        ("kv block token (head dim/2)/8 (head dim)%8", "a factor of a factor at character 26"),
        ("kv token (head dim)/8 (head dim)%8 (dim block)/2", "block must appear once, or once.*block/2"),
        ("kv block (head dim)/8 token (head dim)%4", "dim must appear once.*dim/8 dim%4"),
        ("kv block (head dim)/8 token", "dim must appear once"),
        ("block head (k: token dim | v: token dim)/2", r"cannot be factored at character 39"),
        ("block head; token", "cannot read from character 10: '; token'"),
        ("block head Token kv dim", "cannot read from character"),
        ("block head token/0 kv dim", "cannot read from character 16"),
        ("block head token/1234567890 token%1 kv dim", "cannot read from character"),
        ("block head token kv", "dim must appear once"),
        ("block head token kv dim dim", "dim must appear once.*k has dim dim"),
        ("block head token/4 kv dim", "token must appear once.*token/4"),
        ("block head token%4 kv dim", "token must appear once"),
        ("block head token/4 token%8 kv dim", "token must appear once.*token/4 token%8"),
        ("block head token/4 token/4 kv dim", "token must appear once"),
        ("block head token token/4 token%4 kv dim", "token must appear once"),
        ("block/2 block%2 head token kv dim", "block cannot be factored"),
        ("block head token dim kv/2 kv%2", "kv cannot be factored"),
        ("block head (token kv dim", r"'\)' is missing"),
        ("block head token kv dim)", r"'\)' is not an axis.*at character 23"),
        ("block head token () kv dim", "a parenthesis holds plain axes"),
        ("block (head (token kv)) dim", "inside another at character 12"),
        ("block (head (k: token dim | v: token dim))", "inside another"),
        ("block head (k: token dim)", r"'\)' is not an axis"),
        ("block head (k: token dim | token dim)", "'v:' is missing"),
        ("block head (k: token dim | v: token dim", r"'\)' is missing"),
        ("block head (k: token dim", r"'\|' is missing"),
        ("block head (v: token dim | k: token dim)", "'v:' is not an axis"),
        ("block head k: token dim", "'k:' is not an axis"),
        ("block head (k: token dim | v: token)", r"dim must appear once.*v has nothing"),
        ("block head kv (k: token dim | v: token dim)", "kv must appear once"),
        ("(k: token dim | v: token dim) block head", "must come last"),
        ("block head (k: (k: token | v: token) dim | v: token dim)", "inside another"),
        ("block head (k:/3 token dim | v: token dim)", "'k:' cannot be factored at character 12"),
        ("block head (k: token dim | v:%3 token dim)", "'v:' cannot be factored at character 27"),
        ("(" * 4000, "inside another"),
        ("(k:" * 1300, "inside another"),
        (f"{FOUR} kv dim{' ' * MAX_TEXT}", f"limit is {MAX_TEXT}"),
    ],
)
def test_errors_say_what_and_where(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text)


@given(st.lists(st.sampled_from([*AXES, "(", ")", "|", "k:", "v:", "token/4", "token%4", "dim/2", "dim%2", "/", "x"])))
def test_any_words_parse_or_are_refused(words: list[str]) -> None:
    text = " ".join(words)
    try:
        parsed = Layout.parse(text)
    except LayoutError:
        return
    assert Layout.parse(str(parsed)) == parsed


@given(st.text(max_size=80))
def test_any_text_parses_or_is_refused(text: str) -> None:
    with contextlib.suppress(LayoutError):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "sizes", "message"),
    [
        ("block head token/16 token%16 kv dim", {"block_size": 24}, "token has 24, which token%16 does not divide"),
        ("block head token kv dim/8 dim%8", {"head_dim": 4}, "dim has 4, which dim%8 does not divide"),
        ("block head/2 head%2 token kv dim", {"heads": 3}, "head has 3"),
        ("block head (k: dim token | v: dim token/5 token%5)", {}, "token has 16"),
    ],
)
def test_a_factor_must_divide(text: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text).bind(**{"heads": 2, "head_dim": 8, "block_size": 16, **sizes})


def test_sizes_of_known_layouts() -> None:
    bound = Layout.parse("block head (k: dim token | v: token dim)").bind(heads=2, head_dim=4, block_size=8, blocks=3)
    assert bound.block_elements == 2 * 2 * 4 * 8
    assert (bound.k.offset, bound.v.offset) == (0, 32)
    assert [(f.axis, f.stride) for f in bound.k.factors] == [("block", 128), ("head", 64), ("token", 1), ("dim", 8)]
    assert [(f.axis, f.stride) for f in bound.v.factors] == [("block", 128), ("head", 64), ("token", 4), ("dim", 1)]
    assert np.all([f.extent > 0 for f in bound.v.factors])
