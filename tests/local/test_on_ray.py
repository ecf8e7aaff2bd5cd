"""What `deeplink emit --format ray` writes is what `deeplink.local.on_ray` reads; the start itself needs a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from described import write

from deeplink import config
from deeplink.local import on_ray
from deeplink.solver import emit
from deeplink.solver.emit import ray
from deeplink.solver.fleets import fleetfile
from deeplink.solver.place import place


def test_the_router_gets_every_engines_address(tmp_path: Path) -> None:
    placement = place(fleetfile.load(write(tmp_path)))
    document = json.loads(emit.files(placement, "ray")["ray.json"])
    hosts = [f"10.0.0.{index}" for index in range(len(document["engines"]))]
    (tmp_path / "deeplink.toml").write_text(on_ray.routed(document, hosts, tmp_path / "secret"))
    read = config.load(tmp_path / "deeplink.toml")
    assert read.secret_file == (tmp_path / "secret").resolve()
    for engine, made, host in zip(read.engines, document["engines"], hosts, strict=True):
        assert (engine.name, engine.url) == (made["name"], f"http://{host}:{made['port']}")
    assert (ray.HOST, ray.SECRET) == (on_ray.HOST, on_ray.SECRET)


@pytest.mark.long
def test_a_real_cluster_of_one_node(tmp_path: Path) -> None:
    """Actors are put where their resources are, the router finds them, and nothing is left."""
    cluster = pytest.importorskip("ray")
    (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "engine.py").write_text(
        "import http.server, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers(); self.wfile.write(b'{}')\n"
        "http.server.HTTPServer(('0.0.0.0', int(sys.argv[1])), Handler).serve_forever()\n"
    )
    from deeplink.local.engines import free_ports

    port, router = free_ports(2)
    engine = {
        "name": "e",
        "words": ["python3", str(tmp_path / "engine.py"), str(port)],
        "variables": {},
        "port": port,
        "config": f'secret_file = "{on_ray.SECRET}"\n',
        "gpus": 0,
        "resources": {"deeplink-a-chip": 1},
    }
    text = f'secret_file = "{on_ray.SECRET}"\n[router]\nport = {router}\n[[engines]]\nname = "e"\nkind = "plain"\n'
    document = {"router": f'{text}url = "http://{on_ray.HOST}:{port}"\n', "engines": [engine]}
    cluster.init(num_cpus=1, resources={"deeplink-a-chip": 1}, include_dashboard=False)
    try:
        on_ray.run(document, tmp_path / "secret", tmp_path, once=True)
    finally:
        cluster.shutdown()
