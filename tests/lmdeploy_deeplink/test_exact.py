"""The float64 side of the suite, against values by hand and what must hold of any operator. No torch is needed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lmdeploy_deeplink.conformance import exact
from lmdeploy_deeplink.conformance.exact_attention import attention
from lmdeploy_deeplink.conformance.precision import BFLOAT16, FLOAT16, FLOAT32, PRECISIONS, Array, Precision

PRECISE = st.sampled_from([FLOAT32, FLOAT16, BFLOAT16])


def floats(*shape: int) -> st.SearchStrategy[Array]:
    return arrays(np.float64, shape, elements=st.floats(-8, 8, width=32))


def row(*values: float) -> Array:
    return np.array([values])


def test_a_norm_by_hand() -> None:
    made = exact.rms_norm(row(3.0, 4.0), np.array([1.0, 2.0]), 0.0, FLOAT32)
    root = math.sqrt(12.5)
    assert made.value == pytest.approx(row(3 / root, 8 / root))


def test_epsilon_counts_where_values_are_tiny() -> None:
    made = exact.rms_norm(row(1e-4, 1e-4), np.ones(2), 1e-8, FLOAT16)
    assert made.value == pytest.approx(row(math.sqrt(0.5), math.sqrt(0.5)))


@given(floats(3, 8), PRECISE)
def test_a_norm_has_the_root_mean_square_of_its_weight(x: Array, precision: Precision) -> None:
    x = x + 10
    made = exact.rms_norm(x, np.full(8, 2.0), 0.0, precision)
    assert np.square(made.value).mean(-1) == pytest.approx(np.full(3, 4.0))


def test_silu_by_hand() -> None:
    gate, up = row(0.0, 1.0, -1.0, 1000.0, -1000.0), row(5.0, 2.0, 2.0, 1.0, 1.0)
    made = exact.silu_and_mul(gate, up, FLOAT32)
    assert made.value == pytest.approx(row(0.0, 2 / (1 + math.e**-1), -2 / (1 + math.e), 1000.0, 0.0))


def test_a_quarter_turn_exchanges_the_halves() -> None:
    heads = np.arange(1.0, 7.0).reshape(1, 1, 6)
    made = exact.rotary(heads, np.zeros((1, 4)), np.ones((1, 4)), FLOAT32)
    assert made.value.ravel().tolist() == [-3.0, -4.0, 1.0, 2.0, 5.0, 6.0]
    assert made.slack.ravel()[4:].tolist() == [0.0, 0.0]


@given(floats(2, 3, 8), floats(2, 4), PRECISE)
def test_turning_keeps_lengths(heads: Array, angles: Array, precision: Precision) -> None:
    both = np.tile(angles, 2)
    made = exact.rotary(heads, np.cos(both), np.sin(both), precision)
    assert np.linalg.norm(made.value, axis=-1) == pytest.approx(np.linalg.norm(heads, axis=-1))


@given(floats(4, 2, 8), floats(4, 2, 8), st.floats(0, 6))
def test_turned_products_depend_on_the_distance_alone(queries: Array, keys: Array, by: float) -> None:
    """What rotary embeddings are for: turning both by the same angle changes no logit."""
    angles = np.full((4, 8), by)
    turned = [exact.rotary(side, np.cos(angles), np.sin(angles), FLOAT32).value for side in (queries, keys)]
    assert (turned[0] * turned[1]).sum(-1) == pytest.approx((queries * keys).sum(-1), abs=1e-9)


def attend(query: Array, key: Array, value: Array, *, causal: bool = True, scale: float = 1.0) -> Array:
    made = attention(query, key, value, causal=causal, scale=scale, slopes=None, precision=FLOAT32)
    return made.value


@given(floats(1, 2, 4), floats(1, 1, 4), floats(1, 1, 3))
def test_one_token_gets_its_own_value(query: Array, key: Array, value: Array) -> None:
    assert attend(query, key, value) == pytest.approx(np.broadcast_to(value, (1, 2, 3)))


@given(floats(5, 1, 4), floats(5, 1, 3))
def test_a_query_of_zeros_gets_the_mean_of_what_it_sees(key: Array, value: Array) -> None:
    means = np.cumsum(value, 0) / np.arange(1, 6)[:, None, None]
    assert attend(np.zeros((5, 1, 4)), key, value) == pytest.approx(means)
    whole = attend(np.zeros((5, 1, 4)), key, value, causal=False)
    assert whole == pytest.approx(np.broadcast_to(value.mean(0), (5, 1, 3)))


@given(floats(3, 2, 4), floats(7, 2, 4), floats(7, 2, 3))
def test_a_later_chunk_is_the_end_of_the_whole(query: Array, key: Array, value: Array) -> None:
    whole = attend(np.concatenate([np.ones((4, 2, 4)), query]), key, value)
    assert attend(query, key, value) == pytest.approx(whole[4:])


@given(floats(2, 4, 4), floats(2, 2, 4), floats(2, 2, 3))
def test_neighbouring_query_heads_share_a_kv_head(query: Array, key: Array, value: Array) -> None:
    assert attend(query, key, value) == pytest.approx(attend(query, key.repeat(2, 1), value.repeat(2, 1)))


def test_a_slope_prefers_what_is_near() -> None:
    value = np.arange(3.0).reshape(3, 1, 1)
    made = attention(
        np.zeros((1, 1, 2)), np.zeros((3, 1, 2)), value, causal=True, scale=1.0, slopes=[1.0], precision=FLOAT32
    )
    powers = np.exp([-2.0, -1.0, 0.0])
    assert made.value.ravel() == pytest.approx([powers @ np.arange(3.0) / powers.sum()])


def test_large_logits_are_no_overflow() -> None:
    value = attend(np.full((2, 1, 4), 1e3), np.full((2, 1, 4), 1e3), np.ones((2, 1, 3)))
    assert value == pytest.approx(np.ones((2, 1, 3)))


def test_products_by_hand() -> None:
    x, weight, bias = row(1.0, 2.0), np.array([[3.0, 4.0], [5.0, 6.0]]), np.array([0.5, -0.5])
    assert exact.linear(x, weight, bias, FLOAT32).value.tolist() == [[11.5, 16.5]]


def test_quantized_weights_by_hand() -> None:
    quantized = np.array([[1.0, 2.0], [3.0, 4.0]])
    whole = exact.weight_quant_matmul(
        row(1.0, 1.0), quantized, np.array([0.5, 2.0]), np.array([1.0, -1.0]), None, 0, FLOAT32
    )
    assert whole.value.tolist() == [[(2 + 4) * 0.5, (1 + 3) * 2.0]]
    scales = np.array([[1.0, 1.0], [10.0, 10.0]])
    grouped = exact.weight_quant_matmul(row(1.0, 1.0), quantized, scales, None, None, 1, FLOAT32)
    assert grouped.value.tolist() == [[31.0, 42.0]]


def test_integers_by_hand() -> None:
    made = exact.linear_w8a8(row(127.0, -128.0), row(2.0, 1.0), np.array([0.5]), np.array([2.0]), None, FLOAT32)
    assert made.value.tolist() == [[126.0]]


def test_gates_by_hand() -> None:
    made = exact.gating(row(0.0, math.log(3.0)), FLOAT32)
    assert made.value == pytest.approx(row(0.25, 0.75))


@given(floats(3, 4), floats(8, 4), floats(4, 4))
def test_alike_experts_are_one(x: Array, gate_up: Array, down: Array) -> None:
    """Weights that are made to sum to 1 do not matter where all experts are the same."""
    experts = np.array([[0, 1], [1, 2], [2, 0]])
    every = (np.stack([gate_up] * 3), np.stack([down] * 3))
    made = exact.fused_moe(x, *every, np.array([[0.1, 0.3]] * 3), experts, True, FLOAT32)
    act = exact.silu_and_mul(x @ gate_up[:4].T, x @ gate_up[4:].T, FLOAT32).value
    assert made.value == pytest.approx(act @ down.T, abs=1e-6)


def test_strips_by_hand() -> None:
    made = exact.strips(np.arange(6.0).reshape(1, 2, 3), 2).value
    assert made.shape == (1, 2, 16, 2)
    assert made[0, :, :2].tolist() == [[[0.0, 1.0], [3.0, 4.0]], [[2.0, 0.0], [5.0, 0.0]]]
    assert not made[0, :, 2:].any()


@given(floats(2, 6), floats(3, 6), PRECISE)
def test_no_slack_is_wider_than_what_the_element_type_costs(x: Array, weight: Array, precision: Precision) -> None:
    """A bound that is too wide catches nothing: a product may be off by its rounding and by its sum, no more."""
    made = exact.linear(x, weight, None, precision)
    most = (
        4 * precision.unit * np.abs(made.value)
        + 40 * FLOAT32.unit * (np.abs(x) @ np.abs(weight).T)
        + 4 * precision.tiny
    )
    assert (made.slack <= most).all()


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=lambda one: one.dtype)
def test_units_are_those_of_the_types(precision: Precision) -> None:
    if precision.dtype == "int8":
        return
    kind = np.float16 if precision.dtype == "float16" else np.float32
    if precision.dtype != "bfloat16":
        assert precision.unit == np.finfo(kind).eps / 2
        assert precision.tiny == float(np.finfo(kind).smallest_subnormal) / 2
    else:
        import ml_dtypes

        assert precision.unit == float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps) / 2
        assert precision.tiny == float(ml_dtypes.finfo(ml_dtypes.bfloat16).smallest_subnormal) / 2
