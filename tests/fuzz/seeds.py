"""What fuzzing begins with: real messages, and texts of every kind that is understood."""

from __future__ import annotations

import json
import struct

import msgspec
from loopback import AMX, HND, NHD, NZ, SECRET, SLOTS, VEC, make_contract, make_group
from targets import KEY

from deeplink.doctor import exchange
from deeplink.errors import Reason
from deeplink.kvconnector.contracts import contract
from deeplink.kvconnector.contracts.contract import Scales, local_address
from deeplink.kvconnector.handoffs import channel, ticket
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.handoff import Record
from deeplink.kvconnector.layouts.catalogue import LAYOUTS
from deeplink.kvconnector.prefixes import space as prefix_space
from deeplink.kvconnector.transport import talk
from deeplink.kvconnector.transport.shm import LOANS
from deeplink.kvconnector.wires.greeting import MAGIC

PLAIN = make_contract("p", "prefill", make_group(VEC, 64), channel="127.0.0.1:1", tcp="127.0.0.1:2")
LOCAL = make_contract("d", "both", make_group(HND, 128), channel="[::1]:3", shm=local_address("host.1", "a"), tcp="h:4")
_fp8 = msgspec.structs.replace(
    make_group(NHD, 16, "float8_e4m3fn"), scales=Scales("tensor", (0.5, 0.25, 1.0, 2.0, 1e-3, 3.5))
)
_int8 = msgspec.structs.replace(
    make_group(SLOTS, 1, "int8"), layers=(3,), scales=Scales("token-head", (), "block token head (kv dim)")
)
_sliding = msgspec.structs.replace(make_group(HND, 32, "float16"), layers=(4, 5), kind="sliding", window=128)
CONTRACTS = [
    PLAIN,
    LOCAL,
    msgspec.structs.replace(
        make_contract("e", "decode", _fp8, channel="h:1", tcp="h:2"),
        groups=(_fp8, _int8, _sliding),
        ranks=tuple(
            msgspec.structs.replace(
                PLAIN.ranks[0], tp=rank, heads=((rank, rank + 1), (0, 2), (rank, rank + 1)), layers=(0, 6)
            )
            for rank in range(2)
        ),
        casts=("bfloat16->float16", "*->int8"),
    ),
]
TICKET = ticket.Ticket(
    "0" * 24, "p", "d", ("127.0.0.1:1", "127.0.0.1:3"), 60_000, 2, takes=((0,), (0, 1)), wire=("float16",)
)
MESSAGES: list[channel.Message] = [
    channel.Hello(contract.encode(CONTRACTS[0])),
    channel.Claim(
        ticket.mint(TICKET, SECRET),
        b"c" * 12,
        b"p" * 16,
        (channel.Part(0, (0, 1, 2), (0, 2), 0, 100), channel.Part(1, (3,), (0, 1), 64, 100)),
        "tcp",
        "127.0.0.1:2",
    ),
    channel.Accept(),
    channel.Chunk(0, 1, 0, 64, 1 << 20, b"d" * 64),
    channel.Grant(0, b"k" * 16),
    channel.Sent(1),
    channel.Landed(2),
    channel.End(),
    channel.End(FirstToken(17, -0.5, ((17, -0.5), (3, -1.25)), 64)),
    channel.Fail(Reason("peer_gone", "why", "field", "a", "b", "do this")),
    channel.Quit(Reason("aborted", "left")),
    channel.Ask("0" * 24),
    channel.Cancel("0" * 24),
    channel.Watch(("0" * 24,), (0,)),
    channel.Watched((1,)),
    channel.Answer(Record("0" * 24, "producer", "failed", Reason("a", "b"), 1, 2, 3.5, "f" * 16), 1, 2, 3, 4, {"a": 5}),
]
BODIES: list[object] = [
    {
        "model": "m",
        "prompt": "a \u2028 \ud83d\ude00",
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
    },
    {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2},
    {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 0, "best_of": 3, "max_tokens": 0, "min_tokens": 1},
    {"prompt": "x", "kv_transfer_params": {"deeplink": {}}, "vllm_xargs": {"kv_transfer_params": {}, "a": 1}},
]
SPOKEN: list[talk.Message] = [
    talk.Hello(b"me"),
    talk.Begin(1, ((b"k" * 16, 0, 100), (b"l" * 16, 8, 8))),
    talk.Go((1 << 40, 0), b"me again"),
    talk.No("no region"),
    talk.Stop(1),
    talk.Ended(),
]
REPORTED: list[exchange.Message] = [
    exchange.Hello(1, "0.1.0", "host", 1 << 20, 30.0, {"tcp": "h:1"}, {"shm": Reason("config_error", "why")}),
    exchange.Take("tcp", 100),
    exchange.Taking(b"k" * 16),
    exchange.Sent(),
    exchange.Took("f" * 16),
    exchange.Give("tcp", b"k" * 16, 100),
    exchange.Gave("f" * 16, 1.5, 0.1),
    exchange.Problem(Reason("peer_gone", "why")),
]
DEEP = b"\x91" * 3000 + b"\x90"
"""msgpack that is deeper than any reader goes."""
NESTED = b"\x81\xa1x" + DEEP
NESTED_JSON = b'{"x": ' + b"[" * 3000 + b"]" * 3000 + b"}"
STREAM = b': hi\n\ndata: {"a": 1}\n\ndata: {"error": {"message": "m"}}\r\n\r\nid: 1\rdata: x\r\rdata: [DONE]\n\n'
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody"
CHUNKED = (
    b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nbod\r\n1\r\ny\r\n0\r\nT: t\r\n\r\n"
)


def _frame(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _push(*parts: tuple[int, int], data: bytes = b"") -> bytes:
    return struct.pack("<H", len(parts)) + b"".join(struct.pack("<16sQQ", KEY, *part) for part in parts) + data


def _safetensors(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


_LAYOUTS = [VEC, AMX, NHD, HND, NZ, SLOTS, "block token dim", "dim 512+64 | block token dim"]
_LAYOUTS += list(LAYOUTS.values())
_TICKET = msgspec.msgpack.encode(TICKET)
_MESSAGES = [msgspec.msgpack.encode(message) for message in MESSAGES]
_PUSHES = [
    _push((0, 8), data=b"8 bytes.") + _push(),
    _push((0, 4), (4088, 8), (64, 0), data=b"x" * 12) + _push(),
    _push((4090, 8)),
    _push((1 << 63, 1 << 63)),
    _push(),
]
_TENSORS: dict[str, object] = {
    "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [2000], "data_offsets": [8, 4008]},
    "__metadata__": {"format": "pt"},
}

CACHE_EVENTS: list[list[object]] = [
    [
        {
            "type": "BlockStored",
            "block_hashes": [1, b"h" * 32],
            "parent_block_hash": None,
            "token_ids": list(range(32)),
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "extra_keys": [None, ["salt"]],
            "group_idx": 0,
        },
        {"type": "BlockRemoved", "block_hashes": [1], "medium": None},
        {"type": "AllBlocksCleared"},
    ],
    [
        ["BlockStored", [5, 6], None, [1, 2, 3, 4], 2, None, "GPU"],
        ["BlockRemoved", [5], "GPU"],
        ["BlockStored", [7], 6, [1, 2], 2, 3, "GPU"],
    ],
]
SEEDS: dict[str, list[bytes]] = {
    "contract_bytes": [contract.encode(each) for each in CONTRACTS],
    "contract_json": [contract.to_json(each) for each in CONTRACTS],
    "channel_message": _MESSAGES,
    "channel_frame": [b"".join(map(_frame, _MESSAGES)), _frame(_MESSAGES[0])],
    "transport_frame": [b"".join(_frame(msgspec.msgpack.encode(message)) for message in SPOKEN), _frame(NESTED)],
    "transport_description": [
        json.dumps({"mr_info": {"a": {"addr": 4096, "length": 100}, "b": {"addr": 1, "length": 1 << 61}}}).encode(),
        json.dumps({"mr_info": {"a": {"addr": 1 << 63, "length": -1}}}).encode(),
        msgspec.msgpack.encode({"name": "agent", "metadata": b"of it"}),
        NESTED,
        NESTED_JSON,
    ],
    "doctor_frame": [b"".join(_frame(msgspec.msgpack.encode(message)) for message in REPORTED), _frame(NESTED)],
    "greeting": [MAGIC + b"n" * 16 + b"m" * 32, MAGIC],
    "ticket_text": [ticket.mint(TICKET, b"another secret, also of 32 bytes").encode(), b"AAAA", b""],
    "ticket_body": [_TICKET, bytes([_TICKET[0] + 1]) + _TICKET[1:] + DEEP],
    "layout_text": [struct.pack("<BHHB", heads, 576, 32, 3) + text.encode() for text in _LAYOUTS for heads in (1, 2)],
    "consent": [b"bfloat16->float16", b"*->float8_e4m3fnuz", b" int8 -> float32 "],
    "tcp_parts": _PUSHES,
    "shm_parts": [
        *(b"\0" + each for each in _PUSHES),
        b"\0" + struct.pack("<HH", LOANS, 1) + bytes(52),
        b"\1" + bytes(60),
    ],
    "router_body": [json.dumps(each).encode() for each in BODIES]
    + [b'{"\\u006bv_transfer_params":1,"kv_transfer_params":{},"kv_transfer_params":2}', b'{"a":1e999,"b":NaN}'],
    "client_bytes": [
        bytes([step]) + REQUEST * 2 + CHUNKED + request
        for step in (0, 6, 255)
        for request in (
            REQUEST.replace(b"POST", b"HEAD") + REQUEST,
            b"GET /health HTTP/1.0\r\n\r\n",
            b"HEAD / HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n",
        )
    ],
    "engine_bytes": [
        bytes([step]) + b"HTTP/1.1 " + answer
        for step in (0, 6, 255)
        for answer in (
            b"200 OK\r\nContent-Length: 4\r\n\r\nbody",
            b"100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
            b"503 no\r\nConnection: close\r\n\r\nbody",
            b"204 none\r\n\r\n",
        )
    ],
    "engine_body": [
        json.dumps({"prompt": "x", "kv_transfer_params": {"deeplink": {"side": "produce", "ticket": "T"}}}).encode(),
        b'{"kv_transfer_params": ' + b"[" * 3000,
    ],
    "events": [bytes([step]) + STREAM for step in (0, 3, 200)],
    "cache_events": [msgspec.msgpack.encode([1.5, events, 0]) for events in CACHE_EVENTS],
    "checkpoint": [_safetensors(_TENSORS, b"d" * 4008), _safetensors({}, b"")],
    "checkpoint_index": [json.dumps({"weight_map": {"a": "model.safetensors"}}).encode(), NESTED_JSON],
    "stored_space": [
        prefix_space.encode(prefix_space.of_group(PLAIN.model, PLAIN.groups[0], 16)),
        NESTED_JSON,
    ],
}
"""By the name of the target."""
