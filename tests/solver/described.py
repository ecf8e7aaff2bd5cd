"""A fleet file and what lies beside it, to change one thing in and see what happens."""

from __future__ import annotations

import json
from pathlib import Path

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
