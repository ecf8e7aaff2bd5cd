"""A position encoding as canonical text, whatever way an engine writes its parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KEYS = ("rope_scaling", "rope_parameters")
"""Where a model's config has them; releases of transformers differ, and engines add the older name to the newer."""
LOOSE = ("rope_theta", "partial_rotary_factor")
"""Those that may stand beside the others instead of among them."""


def canonical(config: object) -> str:
    """The parameters of `config`, a model's text config, as JSON that is equal exactly for equal encodings."""
    found: dict[str, Any] = {}
    for key in KEYS:
        given = getattr(config, key, None)
        if isinstance(given, Mapping):
            found |= given
    loose = {key: value for key in LOOSE if (value := getattr(config, key, None)) is not None}
    if any(isinstance(value, Mapping) for value in found.values()):  # one encoding for each kind of layer
        found = {key: _one(value, loose) for key, value in found.items() if isinstance(value, Mapping)}
    else:
        found = _one(found, loose)
    return json.dumps(found, sort_keys=True, default=str)


def _one(parameters: Mapping[str, Any], loose: Mapping[str, Any]) -> dict[str, Any]:
    found = {**loose, **{key: value for key, value in parameters.items() if value is not None}}
    older = found.pop("type", "default")
    found.setdefault("rope_type", older)
    return found
