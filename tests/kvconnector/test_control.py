"""The control endpoint over real HTTP, in front of real endpoints."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from loopback import SECRET, Pair, Side
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from sockets import eventually

from deeplink.errors import ConfigError, Reason
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.control import Blocks, Control
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.handoff import BEGUN, COMPLETE, NOT_BEGUN
from deeplink.kvconnector.handoffs.tally import SECONDS
from deeplink.kvconnector.wires import visitors
from deeplink.secret import control_token, derive

TOKENS = 333
OURS, THEIRS = [5, 2, 9, 0, 7, 11], [3, 1, 8]
TOKEN = control_token(SECRET)
Serve = Callable[..., "Client"]


class Client:
    def __init__(self, port: int, token: str = TOKEN) -> None:
        self.port = port
        self.headers = {"Authorization": f"Bearer {token}"}

    def call(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, headers=self.headers if headers is None else headers)
            answer = connection.getresponse()
            return answer.status, answer.getheader("Content-Type", ""), answer.read()
        finally:
            connection.close()

    def json(self, path: str, status: int = 200) -> Any:
        got, kind, body = self.call(path)
        assert (got, kind.split(";")[0]) == (status, "application/json"), body
        return json.loads(body)


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Control] = []

    def _serve(side: Side, blocks: Blocks = Blocks(100, 7)) -> Client:  # noqa: B008 - frozen
        made.append(Control(side.endpoint.contract, SECRET, lambda: blocks))
        return Client(made[-1].start("127.0.0.1", 0))

    yield _serve
    for control in made:
        control.close()


PATHS = ["/v1/contract", "/v1/status", "/v1/handoffs/x", "/v1/handoffs/x/stage", "/metrics"]


@pytest.mark.parametrize("path", [*PATHS, "/"])
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer \xff\xfe",
        "Basic eDp5",
        f"bearer {TOKEN}",
    ],
)
def test_without_the_token_nothing_is_told(pair: Pair, serve: Serve, path: str, authorization: str | None) -> None:
    client = serve(pair.producer)
    headers = {} if authorization is None else {"Authorization": authorization}
    status, _, body = client.call(path, headers=headers)
    assert status == 401
    assert TOKEN.encode() not in body
    assert client.call(path, "DELETE", headers)[0] == 401


def test_the_channels_key_is_not_the_token(pair: Pair, serve: Serve) -> None:
    client = serve(pair.producer)
    assert Client(client.port, derive(SECRET, "channel").hex()).call("/v1/status")[0] == 401


def test_the_contract(pair: Pair, serve: Serve) -> None:
    client = serve(pair.producer)
    status, kind, body = client.call("/v1/contract")
    assert (status, kind) == (200, "application/msgpack")
    assert co.decode(body) == pair.producer.endpoint.contract
    status, kind, body = client.call("/v1/contract", headers={**client.headers, "Accept": "application/json"})
    assert status == 200
    assert kind.startswith("application/json")
    assert msgspec.json.decode(body, type=co.Contract) == pair.producer.endpoint.contract


def test_status(pair: Pair, serve: Serve) -> None:
    ours, theirs = serve(pair.producer), serve(pair.consumer, Blocks(50, 0))
    expected = {
        "engine": "test",
        "engine_version": "0",
        "chip": "cpu",
        "role": "prefill",
        "epoch": pair.producer.epoch,
        "blocks": {"total": 100, "held": 7},
        "early": False,
        "staging": {"capacity": 2 << 20, "used": 0},
        "claims": 0,
        "handoffs": 0,
        "ended": {},
        "late": 0,
    }
    assert ours.json("/v1/status") == expected

    ticket, text = pair.ticket(60)
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, 200)
    used = pair.producer.endpoint._outgoing.used
    assert ours.json("/v1/status") == {**expected, "staging": {"capacity": 2 << 20, "used": used}, "handoffs": 1}
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    eventually(lambda: ours.json("/v1/status")["claims"] == 1)
    assert theirs.json("/v1/status")["claims"] == 1
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    pair.quiet()
    assert ours.json("/v1/status") == {**expected, "ended": {"drained": 1}}
    assert theirs.json("/v1/status")["ended"] == {"loaded": 1}
    assert theirs.json("/v1/status")["blocks"] == {"total": 50, "held": 0}


def test_the_fate_of_a_handoff(pair: Pair, serve: Serve) -> None:
    ours, theirs = serve(pair.producer), serve(pair.consumer)
    ticket, text = pair.ticket(60)
    path = f"/v1/handoffs/{ticket.handoff}"
    assert "error" in ours.json(path, 404)
    pair.open(ticket, TOKENS)
    assert ours.json(path)["state"] == "filling"
    assert "error" in theirs.json(path, 404)
    pair.fill(ticket, OURS, TOKENS)
    assert ours.json(path)["state"] == "staged"
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    assert pair.outcome().reason is None
    pair.settle(ticket, "drained", "loaded")
    sent, loaded = ours.json(path), theirs.json(path)
    for record, side, state in ((sent, "producer", "drained"), (loaded, "consumer", "loaded")):
        assert record.pop("milliseconds") > 0
        assert len(record["digest"]) == 16
        assert record == {
            "handoff": ticket.handoff,
            "side": side,
            "state": state,
            "reason": None,
            "tokens": TOKENS,
            "kv_bytes": TOKENS * 1536,
            "digest": sent["digest"],
            "resumed": 0,
        }


def test_a_failure_tells_its_reason(pair: Pair, serve: Serve) -> None:
    ours, theirs = serve(pair.producer), serve(pair.consumer)
    ticket, text = pair.ticket(60)
    pair.open(ticket, TOKENS, b"\x01")
    pair.load(pair.order(ticket, text, THEIRS, TOKENS, prompt=b"\x02"))
    assert pair.outcome().reason is not None
    pair.quiet()
    for client in (ours, theirs):
        record = client.json(f"/v1/handoffs/{ticket.handoff}")
        reason = msgspec.convert(record["reason"], Reason)
        assert record["state"] == "failed"
        assert (reason.code, reason.field, reason.ours, reason.theirs) == ("contract_refused", "prompt", "01", "02")
        assert reason.remedy


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_cancel(pair: Pair, serve: Serve, side: str) -> None:
    client = serve(getattr(pair, side))
    ticket, text = pair.ticket(60)
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, 200)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    eventually(lambda: pair.producer.endpoint.producer.claims)
    path = f"/v1/handoffs/{ticket.handoff}"
    assert client.call(path, "DELETE") == (204, "", b"") or client.call(path, "DELETE")[0] == 204
    reason = pair.outcome().reason
    assert reason is not None
    assert reason.code == "aborted"
    pair.settle(ticket, "aborted", "failed")
    assert client.call(path, "DELETE")[0] == 204
    assert client.json(path)["reason"]["code"] == "aborted"
    assert client.call("/v1/handoffs/unknown", "DELETE")[0] == 204


@pytest.mark.parametrize("name", ["x" * 300, "x" * 4000, "%00", "a%2Fb", "%F0%9F%92%A9", "..%2f..", "'%22<"])
def test_odd_names(pair: Pair, serve: Serve, name: str) -> None:
    client = serve(pair.producer)
    assert client.call(f"/v1/handoffs/{name}")[0] == 404
    assert client.call(f"/v1/handoffs/{name}", "DELETE")[0] == 204
    assert client.json("/v1/status")["handoffs"] == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/status", 405),
        ("DELETE", "/v1/contract", 405),
        ("GET", "/v2/status", 404),
        ("GET", "/v1/handoffs/", 404),
    ],
)
def test_what_there_is_not(pair: Pair, serve: Serve, method: str, path: str, status: int) -> None:
    assert serve(pair.producer).call(path, method)[0] == status


def test_the_process_is_gone(pair: Pair, serve: Serve) -> None:
    client = serve(pair.producer)
    pair.producer.endpoint.close()
    for path in ("/v1/status", "/v1/handoffs/x"):
        assert msgspec.convert(client.json(path, 503), Reason).code == "peer_gone"
    assert client.call("/v1/handoffs/x", "DELETE")[0] == 503
    assert client.call("/v1/contract")[0] == 200  # what it stated is known


def test_the_process_does_not_answer(pair: Pair, serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        contract = pair.producer.endpoint.contract
        ranks = (msgspec.structs.replace(contract.ranks[0], channel=address),)
        pair.producer.endpoint.contract = msgspec.structs.replace(contract, ranks=ranks)
        client = serve(pair.producer)
        assert msgspec.convert(client.json("/v1/status", 503), Reason).code == "deadline_exceeded"


def test_much_staging(pair: Pair, serve: Serve) -> None:
    """More than 2 GiB can be told."""
    pair.producer.endpoint._outgoing.capacity = 3 << 30
    assert serve(pair.producer).json("/v1/status")["staging"]["capacity"] == (3 << 30) + (1 << 20)


def test_a_port_that_is_taken(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        control = Control(pair.producer.endpoint.contract, SECRET, lambda: Blocks(1, 0))
        with pytest.raises(ConfigError) as caught:
            control.start("127.0.0.1", taken.getsockname()[1])
        assert caught.value.field == "deeplink-control-port"
        control.close()


def test_close_gives_the_port_back(pair: Pair) -> None:
    control = Control(pair.producer.endpoint.contract, SECRET, lambda: Blocks(1, 0))
    port = control.start("127.0.0.1", 0)
    assert Client(port).call("/v1/status")[0] == 200
    control.close()
    with pytest.raises(ConnectionRefusedError):
        Client(port).call("/v1/status")
    control.close()
    again = Control(pair.producer.endpoint.contract, SECRET, lambda: Blocks(1, 0))
    assert again.start("127.0.0.1", port) == port
    assert ch.ask(pair.producer.endpoint.contract.ranks[0].channel, SECRET, ch.Ask("")).handoffs == 0
    again.close()


@pytest.mark.parametrize("said", [b"", b"GET /v1/status HTTP/1.1\r\nHost: h\r\nX-", b"\r\n"])
def test_who_does_not_ask_is_left(pair: Pair, serve: Serve, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """And holds no file descriptor of the engine's for longer; who asks is not hurried by that."""
    monkeypatch.setattr(visitors, "FIRST_SECONDS", 0.3)
    client = serve(pair.producer)
    kept = http.client.HTTPConnection("127.0.0.1", client.port, timeout=20)
    kept.request("GET", "/v1/status", headers=client.headers)
    assert kept.getresponse().read()
    first = kept.sock
    with socket.create_connection(("127.0.0.1", client.port), 20) as silent:
        silent.sendall(said)
        assert silent.recv(1) == b""
    kept.request("GET", "/v1/status", headers=client.headers)
    assert kept.getresponse().read()
    assert kept.sock is first
    kept.close()


def test_connections_beyond_the_limit_are_turned_away(
    pair: Pair, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors, "MAX_CONNECTIONS", 2)
    client = serve(pair.producer)
    held = [socket.create_connection(("127.0.0.1", client.port), 20) for _ in range(3)]
    assert held[-1].recv(1) == b""
    for sock in held:
        sock.close()

    def served() -> bool:
        try:
            return client.call("/v1/status")[0] == 200
        except (OSError, http.client.HTTPException):  # those that have left still count for a moment
            return False

    eventually(served)


# -- how far a prefill is --------------------------------------------------------------------------------------


def test_how_far_a_prefill_is(pair: Pair, serve: Serve) -> None:
    """Each answer comes with the news, long before its question is over."""
    client = serve(pair.producer)
    ticket, text = pair.ticket(60)
    path = f"/v1/handoffs/{ticket.handoff}/stage"
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(client.json, f"{path}?seconds=50") for _ in range(8)]
        pair.open(ticket, TOKENS)
        assert client.json(f"{path}?seconds=0.1") == {"stage": NOT_BEGUN}
        pair.fill(ticket, OURS, 200)
        assert [one.result(20) for one in asked] == [{"stage": BEGUN}] * 8
        asked = [pool.submit(client.json, f"{path}?known=1&seconds=50")]
        pair.fill(ticket, OURS, TOKENS)
        assert asked[0].result(20) == {"stage": COMPLETE}
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    assert pair.outcome().reason is None
    assert client.json(f"{path}?seconds=50") == {"stage": COMPLETE}
    assert client.json("/v1/handoffs/another/stage") == {"stage": NOT_BEGUN}


def test_a_process_that_is_gone_has_nobody_wait(pair: Pair, serve: Serve) -> None:
    """The claim then finds out what has happened."""
    client = serve(pair.producer)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.json, "/v1/handoffs/x/stage?seconds=50")
        assert client.json("/v1/handoffs/y/stage?seconds=0.1") == {"stage": NOT_BEGUN}
        pair.producer.endpoint.close()
        assert asked.result(20) == {"stage": COMPLETE}


@pytest.mark.parametrize(
    "query", ["known=3", "known=-1", "known=x", "known=", "seconds=61", "seconds=nan", "seconds=inf"]
)
def test_questions_that_make_no_sense(pair: Pair, serve: Serve, query: str) -> None:
    assert "from 0 to" in serve(pair.producer).json(f"/v1/handoffs/x/stage?{query}", 400)["error"]


def test_it_is_closed_while_somebody_waits(pair: Pair) -> None:
    control = Control(pair.producer.endpoint.contract, SECRET, lambda: Blocks(1, 0))
    client = Client(control.start("127.0.0.1", 0))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.call, "/v1/handoffs/x/stage?seconds=50")
        assert client.json("/v1/handoffs/x/stage?seconds=0.1") == {"stage": NOT_BEGUN}
        control.close()
        assert asked.result(20)[0] == 200  # and the router, which asks again, finds nobody


# -- metrics -------------------------------------------------------------------------------------------------


def samples(client: Client) -> dict[str, float]:
    """Every sample by its name and labels."""
    status, kind, body = client.call("/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            assert f"{sample.name}{{{labels}}}" not in found
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_metrics_of_an_engine_that_has_done_nothing(pair: Pair, serve: Serve) -> None:
    found = samples(serve(pair.producer))
    info = [name for name in found if name.startswith("deeplink_engine_info")]
    assert len(info) == 1
    assert "role=prefill" in info[0]
    assert found["deeplink_blocks{}"] == 100
    assert found["deeplink_blocks_held{}"] == 7
    assert found["deeplink_rank_up{rank=0}"] == 1
    for side in ("producer", "consumer"):
        assert found[f"deeplink_staging_capacity_bytes{{rank=0,side={side}}}"] == 1 << 20
        for name in ("deeplink_handoffs_open", "deeplink_claims", "deeplink_staging_used_bytes"):
            assert found[f"{name}{{rank=0,side={side}}}"] == 0
    assert not [name for name in found if name.startswith("deeplink_handoffs_total")]


def test_metrics_count_every_end_by_its_reason(pair: Pair, serve: Serve) -> None:
    ours, theirs = serve(pair.producer), serve(pair.consumer)
    pair.hand_over(TOKENS, OURS, THEIRS)
    ticket, text = pair.ticket(60)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS, prompt=b"another"))
    assert pair.outcome().reason is not None
    pair.settle(ticket, "failed", "failed")
    pair.producer.endpoint.producer.abort(ticket.handoff)
    ticket, _ = pair.ticket(60)
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, 200)

    found, other = samples(ours), samples(theirs)
    assert found["deeplink_handoffs_total{code=,rank=0,side=producer,state=drained}"] == 1
    assert found["deeplink_handoffs_total{code=contract_refused,rank=0,side=producer,state=failed}"] == 1
    assert other["deeplink_handoffs_total{code=,rank=0,side=consumer,state=loaded}"] == 1
    assert other["deeplink_handoffs_total{code=contract_refused,rank=0,side=consumer,state=failed}"] == 1
    assert found["deeplink_handoffs_open{rank=0,side=producer}"] == 1
    assert found["deeplink_staging_used_bytes{rank=0,side=producer}"] == pair.producer.endpoint._outgoing.used > 0
    assert found["deeplink_tokens_total{rank=0,side=producer}"] == TOKENS
    assert found["deeplink_kv_bytes_total{rank=0,side=producer}"] == TOKENS * 1536
    assert other["deeplink_kv_bytes_total{rank=0,side=consumer}"] == TOKENS * 1536
    assert 0 < found["deeplink_converting_seconds_total{rank=0,side=producer}"] < 60
    assert 0 < other["deeplink_converting_seconds_total{rank=0,side=consumer}"] < 60
    assert found["deeplink_kv_early_bytes_total{rank=0,side=producer}"] == 0
    assert found["deeplink_resumed_total{rank=0,side=producer}"] == 0
    assert found["deeplink_late_notices_total{rank=0}"] == 1
    for names, side, state in ((found, "producer", "drained"), (other, "consumer", "loaded")):
        buckets = [value for name, value in names.items() if "seconds_bucket{le=" in name and f"state={state}" in name]
        assert buckets == sorted(buckets)
        assert len(buckets) == len(SECONDS) + 1
        assert buckets[-1] == names[f"deeplink_handoff_seconds_count{{rank=0,side={side},state={state}}}"] == 1
        assert 0 < names[f"deeplink_handoff_seconds_sum{{rank=0,side={side},state={state}}}"] < 60
    pair.producer.endpoint.producer.abort(ticket.handoff)


def test_metrics_of_a_rank_that_does_not_answer(pair: Pair) -> None:
    contract = pair.producer.endpoint.contract
    gone = msgspec.structs.replace(contract.ranks[0], channel="127.0.0.1:1")
    control = Control(msgspec.structs.replace(contract, ranks=(gone, *contract.ranks)), SECRET, lambda: Blocks(1, 0))
    found = samples(Client(control.start("127.0.0.1", 0)))
    control.close()
    assert (found["deeplink_rank_up{rank=0}"], found["deeplink_rank_up{rank=1}"]) == (0, 1)
    assert "deeplink_claims{rank=1,side=producer}" in found
    assert "deeplink_claims{rank=0,side=producer}" not in found


def test_a_peer_does_not_choose_the_codes_that_are_counted(pair: Pair) -> None:
    ledger = pair.consumer.endpoint._ledger
    for number in range(50):
        ledger.begin(str(number), "consumer", "receiving")
        ledger.end(str(number), "failed", Reason(f"code-{number}", "message"))
    (tally,) = ledger.tallies()
    assert (tally.code, tally.count) == ("handoff_failed", 50)


def test_the_engines_own_registry_is_left_alone(pair: Pair, serve: Serve) -> None:
    before = [metric.name for metric in REGISTRY.collect()]
    assert not [name for name in samples(serve(pair.producer)) if name.startswith(("python_", "process_"))]
    assert [metric.name for metric in REGISTRY.collect()] == before


def test_what_is_sent_before_prefill_has_ended_is_counted_apart(pair: Pair, serve: Serve) -> None:
    ours = serve(pair.producer)
    ticket, text = pair.ticket(60)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, 200)
    offer = pair.producer.endpoint.producer._offers.get(ticket.handoff)
    assert offer is not None
    # All of the two chunks: what is still here when prefill ends is sent after it.
    eventually(lambda: sum(taking.early for taking in offer.claims.values()) == 192 * 1536)
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    pair.settle(ticket, "drained", "loaded")
    found = samples(ours)
    assert found["deeplink_kv_early_bytes_total{rank=0,side=producer}"] == 192 * 1536
    assert found["deeplink_kv_bytes_total{rank=0,side=producer}"] == TOKENS * 1536


def test_what_is_withheld_is_told_to_who_comes_for_it(pair: Pair, serve: Serve) -> None:
    ticket, text = pair.ticket(60)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))  # it may come before that is known
    reason = Reason("contract_refused", "the adapter cannot be told from others", "lora")
    pair.producer.endpoint.withhold(ticket.handoff, reason)
    told = pair.outcome().reason
    assert told is not None
    assert (told.code, told.field) == ("contract_refused", "lora")
    pair.quiet()
    assert serve(pair.producer).json(f"/v1/handoffs/{ticket.handoff}")["reason"]["field"] == "lora"
