"""Engines write the same position encoding differently."""

from __future__ import annotations

from types import SimpleNamespace

from deeplink.kvconnector.contracts.rope import canonical

THETA = 100000.0
DEFAULT = canonical(SimpleNamespace(rope_parameters={"rope_theta": THETA, "rope_type": "default"}))


def test_one_encoding_in_the_ways_engines_write_it() -> None:
    older = SimpleNamespace(rope_theta=THETA, rope_scaling=None)
    both = {"rope_theta": THETA, "rope_type": "default", "type": "default"}
    sglang = SimpleNamespace(rope_scaling=both, rope_parameters=both)
    assert canonical(older) == canonical(sglang) == DEFAULT


def test_what_differs_is_told_apart() -> None:
    theta = SimpleNamespace(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    scaled = SimpleNamespace(rope_theta=THETA, rope_scaling={"type": "linear", "factor": 2.0})
    part = SimpleNamespace(rope_theta=THETA, partial_rotary_factor=0.5)
    texts = {DEFAULT, canonical(theta), canonical(scaled), canonical(part), canonical(SimpleNamespace())}
    assert len(texts) == 5


def test_an_encoding_for_each_kind_of_layer() -> None:
    kinds = {"full_attention": {"rope_theta": 1e6, "type": "default"}, "sliding_attention": {"rope_theta": 1e4}}
    newer = {kind: {**parameters, "rope_type": "default"} for kind, parameters in kinds.items()}
    assert canonical(SimpleNamespace(rope_parameters=kinds)) == canonical(SimpleNamespace(rope_parameters=newer))
    other = {**kinds, "sliding_attention": {"rope_theta": 1e5}}
    assert canonical(SimpleNamespace(rope_parameters=kinds)) != canonical(SimpleNamespace(rope_parameters=other))
