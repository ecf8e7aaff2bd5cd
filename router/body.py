"""The client's JSON body, and the bodies the engines are sent in its place. Pure.

Bodies are the engines' business: no field is checked, dropped or defaulted here, whatever its name. The exception are
`OURS`, such as `kv_transfer_params`, which belong to the router; a client's own are removed, so that clients cannot
pass tickets or have others' caches read. What a body holds is decided on the parsed value, never by looking for text: a
key may be written with escapes, or twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from deeplink.errors import InvalidRequest

PARAMS = "kv_transfer_params"
OURS = frozenset(
    {
        PARAMS,
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "disagg_prefill_dp_rank",
        "migration_request",
        "with_cache",
        "preserve_cache",
    }
)
"""Members by which engines of some kind are told to fetch or keep a cache: the router's to set, never a client's."""
OUTPUT = 256
"""Tokens that an answer is taken to have where the client sets no limit."""
_decode = msgspec.json.Decoder().decode
# vLLM merges this field's members into the place where its connector looks for kv_transfer_params.
_SMUGGLER = "vllm_xargs"


@dataclass(slots=True)
class Body:
    """One request as the client sent it; not to be changed. `fields` is read-only and holds none of `OURS`; `raw` is
    the client's bytes, or those of `fields` where something had to be removed."""

    raw: bytes
    fields: dict[str, Any]

    @property
    def stream(self) -> bool:
        return bool(self.fields.get("stream"))


def parse(raw: bytes) -> Body:
    """Raises InvalidRequest for anything but one JSON object in UTF-8."""
    try:
        fields = _value(raw)
    except RecursionError as exc:
        raise InvalidRequest("the request body is nested too deeply") from exc
    except ValueError as exc:
        # The error's own text may quote the body; the place is enough.
        place = f" (at character {exc.pos})" if isinstance(exc, json.JSONDecodeError) else ""
        raise InvalidRequest(f"the request body is not JSON{place}") from exc
    if not isinstance(fields, dict):
        raise InvalidRequest("the request body is not a JSON object")
    if OURS.isdisjoint(fields) and _SMUGGLER not in fields:
        return Body(raw, fields)
    extra = fields.get(_SMUGGLER)
    holders = [fields, extra] if isinstance(extra, dict) else [fields]
    found = [holder.pop(name) for holder in holders for name in OURS & holder.keys()]
    return Body(_dump(fields) if found else raw, fields)


def _value(raw: bytes) -> Any:
    """What the library that says where it is wrong reads, four times as fast where nothing is."""
    try:
        return _decode(raw)
    except (msgspec.DecodeError, RecursionError):  # it also refuses NaN and halves of pairs, which engines take
        return json.loads(raw.decode())


def other(raw: bytes, media: str) -> Body:
    """As `parse`, for a request whose body may be missing, or a form, which is not looked into."""
    return Body(raw, {}) if not raw or media.startswith("multipart/") else parse(raw)


def tokens(body: Body) -> int:
    """An estimate of how many tokens the prompt has: four bytes of text each, or exact where the client sent ids."""
    prompt = body.fields.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        return len(prompt)
    size = 0
    for text in _texts(body):
        size += len(text) if text.isascii() else len(text.encode(errors="replace"))
    return size // 4 or 1


def output(body: Body) -> int:
    """How many tokens the answer may have; a guess where the client does not limit it."""
    for name in ("max_completion_tokens", "max_tokens"):
        limit = body.fields.get(name)
        if isinstance(limit, int) and limit >= 0:
            return limit
    return OUTPUT


def text(body: Body) -> bytes:
    """The prompt as bytes: equal beginnings of two prompts are equal beginnings here. For comparing, nothing else."""
    prompt = body.fields.get("prompt")
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        return b"".join(b"%d," % item for item in prompt)
    return "\0".join(_texts(body)).encode(errors="replace")


def params(side: str, ticket: str, *, early: bool = False) -> dict[str, Any]:
    """What tells an engine its part in a handoff; `side` is produce or consume. `early`: prefill may still run, or not
    have begun."""
    return {"deeplink": {"side": side, "ticket": ticket, **({"early": True} if early else {})}}


def prefill(body: Body, members: dict[str, Any], *, chat: bool) -> bytes:
    """The body for the engine that prefills: the same prompt, one token, no stream; with these members."""
    fields = dict(body.fields)
    for name in ("stream_options", "min_tokens"):
        fields.pop(name, None)
    fields |= {"stream": False, **members}
    if "n" in fields:
        fields["n"] = 1
    newer = "max_completion_tokens"
    if newer in fields:
        fields[newer] = 1
    if not (chat and newer in fields) or "max_tokens" in fields:
        fields["max_tokens"] = 1
    return _dump(fields)


def unstreamed(body: Body, members: dict[str, Any]) -> bytes:
    """The whole request with these members, but its answer in one piece."""
    fields = dict(body.fields)
    fields.pop("stream_options", None)
    return _dump(fields | {"stream": False, **members})


def decode(body: Body, members: dict[str, Any]) -> bytes:
    """The body for the engine that decodes: the client's own bytes with these members, of `OURS`, put in front."""
    inner = json.dumps(members, separators=(",", ":"))[1:-1].encode()
    start = body.raw.index(b"{") + 1
    comma = b"," if body.fields else b""
    return b"".join((body.raw[:start], inner, comma, body.raw[start:]))


def obstacle(body: Body, *, chat: bool) -> str:
    """Which field keeps this request from being handed over; "" if none does."""
    fields = body.fields
    for name in ("n", "best_of"):
        if fields.get(name) not in (None, 1):
            return name
    for name in ("use_beam_search", "prompt_embeds"):
        if fields.get(name):
            return name
    if fields.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    logprobs = fields.get("logprobs")
    if fields.get("echo") and logprobs is not None and logprobs is not False:
        return "echo"
    # Nothing to decode: with echo, engines take it as "give me my prompt back".
    if 0 in (fields.get("max_tokens"), fields.get("max_completion_tokens")):
        return "max_tokens"
    if not chat and _prompts(fields.get("prompt")) > 1:
        return "prompt"
    return ""


def _prompts(prompt: object) -> int:
    """How many prompts a completion request has. A list of token ids is one."""
    if not isinstance(prompt, list) or all(isinstance(item, int) for item in prompt):
        return 1
    return len(prompt)


def _texts(body: Body) -> list[str]:
    """What the engine's prompt is made of, in its order."""
    fields = body.fields
    found: list[str] = []
    if tools := fields.get("tools"):
        found.append(_dump({"tools": tools}).decode())
    for name in _PROMPTS:
        if name in fields:
            _strings(fields[name], found)
    return found


_PROMPTS = ("prompt", "input", "messages", "documents")


def _strings(value: object, into: list[str], depth: int = 0) -> None:
    """The texts in a prompt, message, or list of either; pictures and sound are not text."""
    if isinstance(value, str):
        into.append(value)
    elif depth >= 4:
        return
    elif isinstance(value, list):
        for item in value:
            _strings(item, into, depth + 1)
    elif isinstance(value, dict):
        for name in _TEXTS:
            if name in value:
                inner = value[name]
                if type(inner) is str:
                    into.append(inner)
                else:
                    _strings(inner, into, depth + 1)


_TEXTS = ("role", "text", "content")


def _dump(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, separators=(",", ":")).encode()
    except RecursionError as exc:
        raise InvalidRequest("the request body is nested too deeply") from exc
