"""The canary, with engines that answer as they are told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from looking import SECRET, look
from loopback import HND, VEC, make_contract, make_group

from deeplink.doctor import canary
from deeplink.doctor.model import Finding
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.control import Blocks, Control
from deeplink.kvconnector.handoffs import ticket as tickets

replace = msgspec.structs.replace
PREFILL = replace(make_contract("p", "prefill", make_group(VEC, 64), channel="127.0.0.1:1", tcp="127.0.0.1:2"))
DECODE = replace(make_contract("d", "decode", make_group(HND, 128), channel="127.0.0.1:3", tcp="127.0.0.1:4"))
TOKENS = list(range(100, 100 + canary.ANSWER))


@dataclass
class Fake:
    """An engine whose log-probabilities are all the same: `handed` after a handoff, `alone` without."""

    contract: Contract
    handed: float = -1.0
    alone: float = -1.0
    change: Callable[[dict[str, Any]], Any] = lambda answer: answer
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    control: str = ""

    def answer(self, body: dict[str, Any]) -> Any:
        self.bodies.append(body)
        choice: dict[str, Any] = {"token_ids": TOKENS, "logprobs": {"token_logprobs": [self.handed] * len(TOKENS)}}
        if "prompt_logprobs" in body:
            known = [{str(token): {"logprob": self.alone}} for token in body["prompt"][1:]]
            choice = {"prompt_logprobs": [None, *known]}
        return self.change({"choices": [choice]})


@pytest.fixture
def pair() -> Iterator[tuple[Fake, Fake]]:
    made = Fake(PREFILL), Fake(DECODE)
    closing: list[Callable[[], None]] = []
    for fake in made:
        control = Control(fake.contract, SECRET, lambda: Blocks(10, 3))
        fake.control = f"http://127.0.0.1:{control.start('127.0.0.1', 0)}"
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fake.url = f"http://127.0.0.1:{server.server_port}"
        closing += [control.close, server.shutdown, server.server_close]
    yield made
    for close in closing:
        close()


def _handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "served"}]})

        def do_POST(self) -> None:
            self._send(fake.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _send(self, answer: Any) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            """Not to the test's output."""

    return Handler


def run(*fakes: Fake, engine: str = "e0") -> list[Finding]:
    Path("secret").write_bytes(SECRET)
    text = 'secret_file = "secret"\n'
    for place, fake in enumerate(fakes):
        text += f'[[engines]]\nname = "e{place}"\nurl = "{fake.url}"\ncontrol = "{fake.control}"\n'
    section = canary.examine(look(text), engine)
    assert section.name == f"canary {engine}"
    return list(section.findings)


def test_the_three_ways_agree(pair: tuple[Fake, Fake]) -> None:
    prefill, decode = pair
    prefill.alone, decode.handed, decode.alone = -1.002, -1.001, -1.0
    (found,) = run(*pair)
    assert (found.name, found.standing) == ("e0 -> e1", "works")
    assert found.facts["from_decode"] == pytest.approx([0.001] * canary.ANSWER)
    assert found.facts["from_prefill"] == pytest.approx([0.001] * canary.ANSWER)
    assert found.facts["apart"] == pytest.approx([0.002] * canary.ANSWER)
    assert found.facts["bound"] == canary.FLOORS["float32"]
    produce, forced = prefill.bodies
    consume, again = decode.bodies
    assert (produce["max_tokens"], consume["max_tokens"]) == (1, canary.ANSWER)
    assert produce["prompt"] == consume["prompt"]
    assert len(set(produce["prompt"])) > 50
    assert max(produce["prompt"]) < PREFILL.model.vocabulary
    assert produce["cache_salt"] == consume["cache_salt"]
    assert forced["prompt"] == again["prompt"] == [*produce["prompt"], *TOKENS]
    sides = [body["kv_transfer_params"]["deeplink"] for body in (produce, consume)]
    assert [side["side"] for side in sides] == ["produce", "consume"]
    assert {tickets.verify(side["ticket"], SECRET).producer for side in sides} == {"p"}
    assert "kv_transfer_params" not in forced


def test_a_wrong_cache_fails(pair: tuple[Fake, Fake]) -> None:
    prefill, decode = pair
    prefill.alone, decode.handed, decode.alone = -1.002, -3.0, -1.0
    (found,) = run(*pair)
    assert found.standing == "failed"
    assert found.reason is not None
    assert (found.reason.field, found.reason.ours, found.reason.theirs) == ("log-probability", "2", "at most 0.01")


def test_what_the_engines_are_apart_is_allowed_twice(pair: tuple[Fake, Fake]) -> None:
    prefill, decode = pair
    prefill.alone, decode.alone = -1.5, -1.0
    decode.handed = -1.9
    assert run(*pair)[0].standing == "works"
    decode.handed = -2.1
    assert run(*pair)[0].standing == "failed"


def test_numbers_that_are_none_fail(pair: tuple[Fake, Fake]) -> None:
    pair[1].handed = float("nan")
    assert run(*pair)[0].standing == "failed"


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: {"choices": []},
        lambda answer: [],
        lambda answer: {"choices": [1]},
        lambda answer: {"choices": [{"text": "no tokens"}]},
        lambda answer: {"choices": [{**answer["choices"][0], "token_ids": ["1"] * canary.ANSWER}]},
        lambda answer: (
            {"choices": [{**answer["choices"][0], "prompt_logprobs": [None]}]}
            if "prompt_logprobs" in answer["choices"][0]
            else answer
        ),
        lambda answer: (
            {"choices": [{**answer["choices"][0], "prompt_logprobs": [{"1": {}}] * 200}]}
            if "prompt_logprobs" in answer["choices"][0]
            else answer
        ),
    ],
)
def test_answers_that_say_nothing_are_told(pair: tuple[Fake, Fake], change: Any) -> None:
    pair[1].change = change
    (found,) = run(*pair)
    assert found.standing == "unknown"
    assert found.reason is not None
    assert found.reason.code == "local_error"


def test_an_engine_that_is_not_there(pair: tuple[Fake, Fake]) -> None:
    pair[1].url = "http://127.0.0.1:1"
    (found,) = run(*pair)
    assert (found.standing, found.reason is not None) == ("unknown", True)


def test_who_is_not_tried(pair: tuple[Fake, Fake]) -> None:
    prefill, decode = pair
    assert [finding.standing for finding in run(*pair, engine="http://127.0.0.1:1")] == ["off"]
    assert [finding.standing for finding in run(prefill)] == ["off"]
    gone = Fake(PREFILL, url="http://127.0.0.1:1", control="http://127.0.0.1:1")
    assert [finding.standing for finding in run(gone, decode)] == ["off"]
    assert prefill.bodies == decode.bodies == []
