"""What fleet files of small engines on this machine's processors begin with; the pools are the tests'."""

from __future__ import annotations

HEAD = """\
version = 1
[model]
config = "config.json"
name = "smollm2"
[workload]
rate = 0.1
[[workload.lengths]]
prompt = 40
output = 24
[[workload.lengths]]
prompt = 300
output = 24
[service]
ttft = 20.0
tpot = 1.0
"""
LINK = """\
[[links]]
from = "prefill"
to = "decode"
gb_per_s = 0.5
convention = "one-way"
per = "link"
"""
