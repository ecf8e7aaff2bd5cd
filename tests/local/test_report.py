"""Each check of the demo fails alone and by name."""

from __future__ import annotations

import json

import msgspec
import pytest

from deeplink.local import report
from deeplink.local.report import EngineFacts, Judged, Leaks, Report, RequestFacts

GOOD = RequestFacts(
    prompt_tokens=40,
    path="handoff",
    kv_bytes=1797120,
    handoff_ms=3.5,
    ttft_ms=120.0,
    digest="00112233aabbccdd",
    tokens_equal=True,
)
JUDGED = Judged("chat", GOOD, producer_digest=GOOD.digest, producer_state="drained", consumer_state="loaded")
NONE = Leaks(0, 0, 0)
ENGINE = EngineFacts("vllm", "0.32.0", "cpu", "float32", 64, "block head (k: dim token | v: token dim)")


def test_nothing_failed() -> None:
    assert report.failed_checks("exact", [JUDGED, JUDGED], NONE, "float32") == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"facts": msgspec.structs.replace(GOOD, path="plain")}, "chat: path: plain"),
        ({"facts": msgspec.structs.replace(GOOD, tokens_equal=False)}, "chat: tokens_equal: "),
        (
            {"facts": msgspec.structs.replace(GOOD, digest="")},
            "chat: digest: prefill 00112233aabbccdd, decode none",
        ),
        (
            {"producer_digest": "ffffffffffffffff"},
            "chat: digest: prefill ffffffffffffffff, decode 00112233aabbccdd",
        ),
        ({"producer_digest": ""}, "chat: digest: prefill none"),
        ({"producer_state": "expired"}, "chat: state: prefill expired, decode loaded"),
        ({"consumer_state": "failed (no)"}, "chat: state: prefill drained, decode failed (no)"),
    ],
)
def test_a_request_fails_by_name(change: dict[str, object], name: str) -> None:
    (failed,) = report.failed_checks("exact", [JUDGED, msgspec.structs.replace(JUDGED, **change)], NONE, "float32")
    assert failed.startswith(name)


def test_in_16_bits_most_answers_are_equal() -> None:
    other = msgspec.structs.replace(JUDGED, name="other", facts=msgspec.structs.replace(GOOD, tokens_equal=False))
    assert report.failed_checks("exact", [JUDGED, other], NONE, "float16") == []
    failed = report.failed_checks("exact", [JUDGED, other, other], NONE, "float16")
    assert [line.partition(": the")[0] for line in failed] == ["other: tokens_equal"] * 2
    assert len(report.failed_checks("exact", [JUDGED, JUDGED, other], NONE, "float32")) == 1


@pytest.mark.parametrize("name", Leaks.__struct_fields__)
def test_a_leak_fails_by_name(name: str) -> None:
    leaks = msgspec.structs.replace(NONE, **{name: 3})
    assert report.failed_checks("exact", [JUDGED], leaks, "float32") == [
        f"leaks.{name}: 3 still held after the last answer"
    ]


def test_a_lossy_agreement_fails() -> None:
    assert report.failed_checks("lossy", [JUDGED], NONE, "float32") == ["agreement: lossy, not exact"]


def test_json_is_one_line_with_the_promised_names() -> None:
    text = report.to_json(Report(ENGINE, ENGINE, "exact", (GOOD,), NONE))
    assert "\n" not in text
    found = json.loads(text)
    assert set(found) == {"prefill", "decode", "agreement", "requests", "leaks"}
    assert set(found["prefill"]) == {"engine", "version", "chip", "dtype", "block_size", "layout"}
    assert set(found["requests"][0]) == {
        "prompt_tokens",
        "path",
        "kv_bytes",
        "handoff_ms",
        "ttft_ms",
        "digest",
        "tokens_equal",
    }
    assert found["leaks"] == {"blocks": 0, "staging_bytes": 0, "claims": 0}
