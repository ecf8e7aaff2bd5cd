"""What the operators' API and the registration of engines are, as an OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deeplink.config import EngineEntry
from deeplink.router.registered import Heartbeat

OPERATOR, ENGINE = "operator", "engine"
"""Whose keys: those of `router.admin_keys_file`, and the token that the shared secret makes."""
_NAME = {
    "name": "name",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1},
    "description": "the engine's",
}
_STATE = {
    "type": "object",
    "required": ["name", "url", "control", "weight", "up", "why", "kind", "draining", "shut", "requests", "tokens"],
    "properties": {
        "name": {"type": "string"},
        "url": {"type": "string"},
        "control": {"type": "string"},
        "weight": {"type": "number"},
        "up": {"type": "boolean"},
        "why": {"type": "string", "description": "why it is down"},
        "kind": {"type": "string"},
        "role": {"type": ["string", "null"]},
        "chip": {"type": ["string", "null"]},
        "epoch": {"type": ["string", "null"]},
        "draining": {"type": "boolean"},
        "shut": {"type": "string", "description": "why it gets no new requests"},
        "kv_use": {"type": "number", "minimum": 0},
        "cache": {"type": ["object", "null"]},
        "requests": {"type": "integer", "minimum": 0},
        "tokens": {
            "type": "object",
            "required": ["prefill", "decode"],
            "properties": {name: {"type": "integer", "minimum": 0} for name in ("prefill", "decode")},
        },
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "code"],
            "properties": {"message": {"type": "string"}, "code": {"type": "string"}},
        }
    },
}


def document() -> dict[str, Any]:
    """Of version 3.1; made once."""
    engine, one = "/deeplink/v1/engines", "/deeplink/v1/engines/{name}"
    state = _answer("the engine as it is now", _ref("Engine"))
    many = {"type": "object", "required": ["engines"], "properties": {"engines": {"type": "array", "items": _STATE}}}
    heard = {"type": "object", "required": ["name", "seconds"]}
    registration = "/deeplink/v1/registrations/{name}"
    return {
        "openapi": "3.1.0",
        "info": {"title": "deeplink router, operators' API", "version": "1"},
        "paths": {
            engine: {"get": _call("All engines", OPERATOR, {"200": _answer("all of them", many)})},
            one: {
                "get": _call("One engine", OPERATOR, {"200": state}),
                "put": _call("Add it, or say where it is now", OPERATOR, {"200": state}, body=_ref("EngineEntry")),
                "delete": _call("Remove it", OPERATOR, {"204": {"description": "removed"}}),
                "parameters": [_NAME],
            },
            f"{one}/drain": {
                "post": _call("No new requests", OPERATOR, {"200": state}),
                "delete": _call("New requests again", OPERATOR, {"200": state}),
                "parameters": [_NAME],
            },
            registration: {
                "put": _call("A heartbeat", ENGINE, {"200": _answer("heard", heard)}, body=_ref("Heartbeat")),
                "delete": _call(
                    "A farewell",
                    ENGINE,
                    {"204": {"description": "gone, or never there"}},
                    query={"epoch": {"type": "string"}, "sequence": {"type": "integer", "minimum": 0}},
                ),
                "parameters": [_NAME],
            },
        },
        "components": {
            "securitySchemes": {name: {"type": "http", "scheme": "bearer"} for name in (OPERATOR, ENGINE)},
            "schemas": {
                "Engine": _STATE,
                "Error": _ERROR,
                "EngineEntry": _given(EngineEntry.model_json_schema()),
                "Heartbeat": _given(Heartbeat.model_json_schema()),
            },
        },
    }


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """The path has the name already."""
    return {**schema, "required": [name for name in schema["required"] if name != "name"]}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _call(
    summary: str,
    key: str,
    answers: Mapping[str, Any],
    *,
    body: Mapping[str, Any] | None = None,
    query: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    errors = {"401": "no key that opens it", "404": "there is no such engine", "405": "not such a call"}
    if body is not None or query is not None:
        errors["400"] = "what was sent is not what it should be"
    if body is not None:
        errors["413"] = "the body is too large"
    made: dict[str, Any] = {
        "summary": summary,
        "security": [{key: []}],
        "responses": dict(answers) | {code: _answer(text, _ref("Error")) for code, text in errors.items()},
    }
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if query is not None:
        made["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in query.items()
        ]
    return made
