"""A fleet file and what lies beside it, to change one thing in and see what happens; and engines of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from deeplink.solver.exact.problem import Role
from deeplink.solver.kinds import DEFAULT, KINDS
from deeplink.solver.placement import VERSION, Placement

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}

FLEET = """\
version = 1
objective = "cost"

[model]
config = "config.json"
name = "Qwen3-32B"

[workload]
rate = 6
[[workload.lengths]]
prompt = 2000
output = 300

[service]
ttft = 3.0
tpot = 0.05

[[pools]]
name = "hopper"
chip = "NVIDIA H100 SXM"
count = 8
price = 3.0
tp = [2]

[[pools]]
name = "h20"
chip = "NVIDIA H20"
count = 8
price = 1.2
tp = [2]

[[links]]
from = "hopper"
to = "h20"
gb_per_s = 50
convention = "one-way"
per = "chip"
"""


def write(folder: Path, text: str = FLEET) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def of_kinds(placement: Placement, chips: tuple[str, ...] = ("NVIDIA H20",), count: int = 1) -> Placement:
    """With engines of every kind in every role on each of the chips; in groups of two where they serve alone."""
    made = [
        msgspec.structs.replace(
            placement.engines[0],
            name=f"{kind}/{role} {index}",
            pool=f"{kind} {index}",
            chip=chip,
            engine=msgspec.UNSET if kind == DEFAULT else kind,
            role=role,
            count=count,
            tp=2 if role == "both" else 1,
            max_num_seqs=0 if role == "prefill" else 37,
            max_num_batched_tokens=700 if role == "both" else 0,
        )
        for kind in KINDS
        for role in ROLES
        for index, chip in enumerate(chips)
    ]
    return msgspec.structs.replace(placement, version=VERSION, engines=tuple(made), routes=())
