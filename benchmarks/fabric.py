"""Pushes by one-sided libraries under kvconnector, beside the same library driven directly in the same run.

    make fabric; .venv/bin/python benchmarks/fabric.py [--json] [--save] [--rounds N] [--only nixl|mooncake]

The rows `nixl` and `mooncake` of `deeplink bench kv`, and with them those of chunks as a handoff makes them, by the
same code (`deeplink.bench.libraries`). UCX_TLS chooses what NIXL goes over. Mooncake needs libibverbs.so.1 on the
loader's path; `make fabric` may have put it under .venv/fabric.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from rows import RESULTS, Row, machine, table, write_table

from deeplink.bench import libraries
from deeplink.bench.rows import Skipped
from deeplink.bench.scale import Scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write it to benchmarks/results and README.md")
    parser.add_argument("--rounds", type=int, default=Scale().rounds, help="three passes each")
    parser.add_argument("--only", choices=libraries.FACTORIES)
    arguments = parser.parse_args()
    wanted = [name for name, case in libraries.CASES.items() if arguments.only in (None, case.library)]
    about = machine()
    found = list(libraries.measure(wanted, replace(Scale(), rounds=arguments.rounds)))
    result = {
        "machine": about,
        "rows": [row.as_json() for row in found if isinstance(row, Row)],
        "skipped": [row.as_json() for row in found if isinstance(row, Skipped)],
    }
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "fabric.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("fabric", result)
    print(json.dumps(result, indent=2) if arguments.json else table(result["rows"]))


if __name__ == "__main__":
    main()
