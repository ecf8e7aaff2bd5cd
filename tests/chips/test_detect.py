"""Every profile is found, by the bus, by the tool and by both; and what a host can be like besides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import outputs
import pytest
from host import Host
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deeplink.chips import report
from deeplink.chips.cards import identify
from deeplink.chips.catalogue import PROFILES, ascend
from deeplink.chips.detect import Detected, Found, detect
from deeplink.chips.tool import Answer
from deeplink.errors import PluginError


@dataclass(frozen=True)
class Case:
    """Two devices of one chip on a host: numbers on the bus where they are known, nodes, and what the tool says."""

    chip: str
    bus: str
    nodes: tuple[str, ...]
    tool: str
    output: str
    kind: str = "120000"
    driver: str = "driver"
    render: bool = False
    addresses: tuple[str, ...] = ("0000:17:00.0", "0000:18:00.0")
    cards: int = 2
    memory: int | None = 65536

    @property
    def number(self) -> str:
        """What the bus says of it, also where that is not known."""
        return self.bus or next((number for name, number in UNNUMBERED.items() if self.chip.startswith(name)), "")


def _nvidia(chip: str, bus: str, model: str) -> Case:
    said = outputs.csv(model, 81559, "00000000:17:00.0", "00000000:18:00.0")
    return Case(
        chip, bus, ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"), "nvidia-smi", said, "030200", memory=81559
    )


def _amd(chip: str, bus: str, model: str) -> Case:
    said = outputs.amd(model, "0000:17:00.0", "0000:18:00.0")
    return Case(chip, bus, ("/dev/kfd",), "amd-smi", said, "038000", "amdgpu", True, memory=196592)


def _intel(chip: str, bus: str, model: str) -> Case:
    said = outputs.xpu(model, "0000:17:00.0", "0000:18:00.0")
    return Case(chip, bus, (), "xpu-smi", said, "038000", "xe", True, memory=None)


ADDRESSES = ("0000:17:00.0", "0000:18:00.0")
MUSA = ("/dev/mtgpu.0", "/dev/mtgpu.1")
MLU = ("/dev/cambricon_dev0", "/dev/cambricon_dev1", "/dev/cambricon_ctl")
METAX = ("0000:0e:00.0", "0000:0f:00.0")
CASES = (
    Case(
        "ascend-910b",
        "19e5:d802",
        ("/dev/davinci0", "/dev/davinci1", "/dev/davinci_manager"),
        "npu-smi",
        outputs.NPU_910B,
        addresses=("0000:01:00.0", "0000:c1:00.0"),
    ),
    Case(
        "ascend-910c",
        "19e5:d803",
        ("/dev/davinci4", "/dev/davinci5"),
        "npu-smi",
        outputs.NPU_910C,
        addresses=("0000:95:00.0", "0000:97:00.0"),
    ),
    Case(
        "ascend-310p",
        "19e5:d500",
        ("/dev/davinci0", "/dev/davinci1"),
        "npu-smi",
        outputs.NPU_310P,
        addresses=("0000:01:00.0",),
        memory=44000,
    ),
    Case(
        "metax-c500",
        "9999:4001",
        ("/dev/mxcd",),
        "mx-smi",
        outputs.mx("MetaX C500"),
        "038000",
        "metax",
        True,
        METAX,
    ),
    Case("metax-c550", "9999:4000", ("/dev/mxcd",), "mx-smi", outputs.mx("MXC550    "), "038000", "metax", True, METAX),
    Case(
        "thead-ppu-zw810e",
        "",
        ("/dev/alixpu_ppu0", "/dev/alixpu_ppu1", "/dev/alixpu", "/dev/alixpu_ctl"),
        "ppu-smi",
        outputs.csv("PPU-ZW810E", 98304, "00000000:17:00.0", "00000000:18:00.0"),
        memory=98304,
    ),
    Case(
        "biren-br100",
        "",
        ("/dev/biren/card_0", "/dev/biren/card_1"),
        "brsmi",
        outputs.BRSMI.replace("166M", "100P"),
        memory=None,
    ),
    Case("biren-br166", "", ("/dev/biren/card_0", "/dev/biren/card_1"), "brsmi", outputs.BRSMI, memory=None),
    Case(
        "hygon-k100-ai",
        "1d94:6210",
        ("/dev/mkfd",),
        "hy-smi",
        outputs.cards("K100_AI", *ADDRESSES),
        "038000",
        "hycu",
        True,
        memory=65520,
    ),
    Case(
        "hygon-bw1000",
        "",
        ("/dev/mkfd",),
        "hy-smi",
        outputs.cards("BW1000", *ADDRESSES),
        "038000",
        "hycu",
        True,
        memory=65520,
    ),
    Case(
        "mthreads-s4000",
        "1ed5:0323",
        MUSA,
        "mthreads-gmi",
        outputs.mthreads("MTT S4000", *ADDRESSES),
        "030200",
        memory=81920,
    ),
    Case(
        "mthreads-s5000",
        "1ed5:0400",
        MUSA,
        "mthreads-gmi",
        outputs.mthreads("MTT S5000", *ADDRESSES),
        "030200",
        memory=81920,
    ),
    Case(
        "enflame-s60",
        "1e36:c035",
        ("/dev/gcu0", "/dev/gcu1"),
        "efsmi",
        outputs.EFSMI,
        addresses=("0000:27:00.0", "0000:28:00.0"),
        memory=42976,
    ),
    Case(
        "iluvatar-bi-v150",
        "",
        ("/dev/iluvatar0", "/dev/iluvatar1"),
        "ixsmi",
        outputs.csv("Iluvatar BI-V150", 32768, "00000000:17:00.0", "00000000:18:00.0"),
        memory=32768,
    ),
    Case(
        "cambricon-mlu370",
        "cabc:0370",
        MLU,
        "cnmon",
        outputs.CNMON.replace("MLU590-M9", "MLU370-X8"),
        addresses=("0000:4f:00.0", "0000:50:00.0"),
        memory=81920,
    ),
    Case(
        "cambricon-mlu590",
        "",
        MLU,
        "cnmon",
        outputs.CNMON,
        addresses=("0000:4f:00.0", "0000:50:00.0"),
        memory=81920,
    ),
    _nvidia("nvidia-a100-sxm-80gb", "10de:20b2", "NVIDIA A100-SXM4-80GB"),
    _nvidia("nvidia-h100-sxm", "10de:2330", "NVIDIA H100 80GB HBM3"),
    _nvidia("nvidia-h200-sxm", "10de:2335", "NVIDIA H200"),
    _nvidia("nvidia-l40s", "10de:26b9", "NVIDIA L40S"),
    _nvidia("nvidia-h20", "10de:2329", "NVIDIA H20"),
    _amd("amd-mi300x", "1002:74a1", "AMD Instinct MI300X OAM"),
    _amd("amd-mi308x", "1002:74a2", "AMD Instinct MI308X OAM"),
    _amd("amd-mi325x", "1002:74a5", "AMD Instinct MI325X"),
    _amd("amd-mi350x", "1002:75a0", "AMD Instinct MI350X"),
    _amd("amd-mi355x", "1002:75a3", "AMD Instinct MI355X"),
    _intel("intel-max-1550", "8086:0bd5", "Intel(R) Data Center GPU Max 1550"),
    _intel("intel-max-1100", "8086:0bda", "Intel(R) Data Center GPU Max 1100"),
    _intel("intel-arc-pro-b60", "8086:e211", "Intel(R) Arc(TM) Pro B60 Graphics"),
)
UNNUMBERED = {"thead": "1ded:ffff", "hygon": "1d94:6320", "iluvatar": "1e3e:ffff", "cambricon": "cabc:ffff"}
"""What the bus may say of a chip whose number there is not known, by the beginning of its name."""
by_chip = pytest.mark.parametrize("case", CASES, ids=lambda case: case.chip)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path)
    made.bus()
    return made


def _on_bus(host: Host, case: Case, number: str) -> None:
    for at, address in enumerate(case.addresses):
        host.pci(address, number, case.kind, case.driver, 128 + at if case.render else None)
        if case.render:
            host.nodes(f"/dev/dri/renderD{128 + at}", f"/dev/dri/card{at}")
    host.nodes(*case.nodes)


def _detect(host: Host) -> Detected:
    return detect(PROFILES, host.root, host.run)


def _only(host: Host) -> Found:
    (found,) = _detect(host).found
    return found


def test_every_profile_has_a_case() -> None:
    assert {case.chip for case in CASES} == {profile.name for profile in PROFILES if profile.vendor}


@by_chip
def test_on_the_bus_with_its_tool(host: Host, case: Case) -> None:
    if number := case.number:
        _on_bus(host, case, number)
    else:
        host.nodes(*case.nodes)
    host.tools[case.tool] = case.output
    found = _only(host)
    assert [card.chip for card in found.cards] == [case.chip] * case.cards
    assert found.asked[-1].detail == ""
    assert found.cards[0].memory_mib == case.memory
    assert found.reasons == ()
    if number:
        assert {card.address for card in found.cards} == set(case.addresses)
        assert all(card.how == ("bus", "tool") for card in found.cards)
        assert all(card.reasons == () for card in found.cards)


@pytest.mark.parametrize("case", [case for case in CASES if case.bus], ids=lambda case: case.chip)
def test_on_the_bus_without_its_tool(host: Host, case: Case) -> None:
    _on_bus(host, case, case.bus)
    found = _only(host)
    assert {card.chip for card in found.cards} == {case.chip}
    assert len(found.cards) == len(case.addresses)
    assert {one.ending for one in found.asked} == {"absent"}
    assert f"{case.tool}: {case.tool} is not installed" in found.reasons


@by_chip
def test_in_a_container_that_has_nodes_but_no_bus(tmp_path: Path, case: Case) -> None:
    host = Host(tmp_path, {case.tool: case.output})
    host.nodes(*case.nodes)
    if not case.nodes:  # Intel's are any GPU's render nodes
        host.nodes("/dev/dri/renderD128")
        assert _detect(host).found == ()
        return
    found = _only(host)
    assert [card.chip for card in found.cards] == [case.chip] * case.cards
    assert all(card.how == ("tool",) for card in found.cards)
    assert _detect(host).reasons


@by_chip
def test_nodes_alone_say_the_vendor_and_not_the_chip(tmp_path: Path, case: Case) -> None:
    host = Host(tmp_path)
    host.nodes(*case.nodes)
    if not case.nodes:
        return
    found = _only(host)
    assert {card.chip for card in found.cards} <= {None}
    assert len(found.cards) == len(found.nodes)
    assert found.reasons
    if not found.cards:
        assert "nothing that says which cards" in found.reasons[-1]
    (_, *lines) = report.lines(_detect(host), PROFILES)
    assert lines
    assert {line.standing for line in lines} == {"warning"}


def test_mixed_vendors_on_one_host(host: Host) -> None:
    for case in CASES:
        if case.chip in ("ascend-910b", "metax-c500", "nvidia-h20", "enflame-s60"):
            _on_bus(host, case, case.bus)
            host.tools[case.tool] = case.output
    host.pci("0000:e1:00.0", "8086:4680", "030000", "i915", 200)
    host.nodes("/dev/dri/renderD200")
    by_vendor = {found.vendor: found for found in _detect(host).found}
    assert {vendor: [card.chip for card in found.cards] for vendor, found in by_vendor.items()} == {
        "Huawei Ascend": ["ascend-910b"] * 2,
        "MetaX": ["metax-c500"] * 2,
        "Enflame": ["enflame-s60"] * 2,
        "NVIDIA": ["nvidia-h20"] * 2,
        "Intel": [None],
    }
    assert by_vendor["MetaX"].nodes == ("/dev/dri/renderD128", "/dev/dri/renderD129")
    assert by_vendor["Intel"].nodes == ("/dev/dri/renderD200",)
    standings = {line.name: line.standing for line in report.lines(_detect(host), PROFILES)}
    assert standings["Ascend 910B"] == "works"
    assert standings["Intel (not known)"] == "off"  # a card for a screen


def test_another_vendors_control_node_is_no_sign_where_the_bus_can_say(host: Host) -> None:
    """Hygon's driver may make AMD's /dev/kfd beside its own."""
    host.pci("0000:17:00.0", "1d94:6210", "038000", "hycu", 128)
    host.nodes("/dev/kfd", "/dev/mkfd", "/dev/dri/renderD128")
    assert [found.vendor for found in _detect(host).found] == ["Hygon"]


def test_two_chips_of_one_vendor(host: Host) -> None:
    host.pci("0000:17:00.0", "10de:2329", "030200", "nvidia")
    host.pci("0000:18:00.0", "10de:26b9", "030200", "nvidia")
    host.nodes("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl")
    assert [card.chip for card in _only(host).cards] == ["nvidia-h20", "nvidia-l40s"]
    assert [line.name for line in report.lines(_detect(host), PROFILES)[1:]] == ["NVIDIA H20", "NVIDIA L40S"]


def test_a_card_that_no_profile_knows(host: Host) -> None:
    host.pci("0000:17:00.0", "19e5:d8ff", driver="devdrv_device_driver")
    host.nodes("/dev/davinci0")
    (card,) = _only(host).cards
    assert card.chip is None
    assert card.pci == "19e5:d8ff"
    assert card.reasons == ("no profile knows the number d8ff on the bus",)
    (line,) = report.lines(_detect(host), PROFILES)[1:]
    assert line.name == "Huawei Ascend (not known)"
    assert line.standing == "warning"
    assert line.reason is not None
    assert line.reason.code == "chip_unknown"


def test_a_card_for_a_screen_counts_once_its_tool_lists_it(host: Host) -> None:
    host.pci("0000:17:00.0", "10de:2684", "030000", "nvidia")
    host.nodes("/dev/nvidia0")
    assert report.lines(_detect(host), PROFILES)[1].standing == "off"
    host.tools["nvidia-smi"] = outputs.csv("NVIDIA GeForce RTX 4090", 24564, "00000000:17:00.0")
    assert report.lines(_detect(host), PROFILES)[1].standing == "warning"


def test_a_name_that_no_profile_knows_does_not_hide_what_the_bus_says(host: Host) -> None:
    host.pci("0000:c1:00.0", "19e5:d802", driver="devdrv_device_driver")
    host.nodes("/dev/davinci0")
    host.tools["npu-smi"] = outputs.NPU_910B.replace("910B2", "910Z9")
    card = _only(host).cards[0]
    assert card.chip == "ascend-910b"
    assert card.model == "910Z9"
    assert card.reasons == ("no profile knows a model '910Z9'",)


def test_a_name_says_more_than_a_number(host: Host) -> None:
    host.pci("0000:17:00.0", "1ed5:0323", "030200", "mtgpu")
    host.nodes("/dev/mtgpu.0")
    host.tools["mthreads-gmi"] = outputs.mthreads("MTT S5000", "0000:17:00.0")
    (card,) = _only(host).cards
    assert card.chip == "mthreads-s5000"
    assert card.reasons == ("its number on the bus, 0323, is that of Moore Threads MTT S4000",)


def test_a_number_that_two_profiles_claim() -> None:
    twin = replace(ascend.PROFILES[0], name="twin", title="Twin", models=())
    profile, reasons = identify((*ascend.PROFILES, twin), 0xD802, "")
    assert profile is None
    assert reasons == ["it may be Ascend 910B or Twin"]
    assert identify((*ascend.PROFILES, twin), 0xD802, "910B3")[0] == ascend.PROFILES[0]


def test_a_card_that_is_passed_to_a_guest_is_not_asked_after(host: Host) -> None:
    host.pci("0000:17:00.0", "10de:2330", "030200", "vfio-pci")
    found = _only(host)
    assert host.asked == []
    assert found.cards[0].reasons == ("bound to vfio-pci: it is passed to a guest",)
    assert [line.standing for line in report.lines(_detect(host), PROFILES)[1:]] == ["off"]


def test_a_card_without_a_driver(host: Host) -> None:
    host.pci("0000:17:00.0", "19e5:d802")
    found = _only(host)
    assert found.cards[0].chip == "ascend-910b"
    assert found.cards[0].reasons == ("no driver is bound to it",)
    (line,) = report.lines(_detect(host), PROFILES)[1:]
    assert line.standing == "warning"
    assert line.reason is not None
    assert (line.reason.code, line.reason.field) == ("chip_unusable", "driver")


def test_a_container_that_sees_the_bus_but_got_no_node(host: Host) -> None:
    host.pci("0000:17:00.0", "10de:2330", "030200", "nvidia")
    found = _only(host)
    assert any("not passed into this container" in reason for reason in found.reasons)
    (line,) = report.lines(_detect(host), PROFILES)[1:]
    assert line.standing == "warning"
    assert line.reason is not None
    assert line.reason.field == "nodes"


def test_a_container_that_got_some_of_the_cards(host: Host) -> None:
    for slot in range(8):
        host.pci(f"0000:{slot + 0x10:02x}:00.0", "10de:2330", "030200", "nvidia")
    host.nodes("/dev/nvidia3", "/dev/nvidia10", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-caps/nvidia-cap1")
    found = _only(host)
    assert found.nodes == ("/dev/nvidia3", "/dev/nvidia10")
    assert any("8 on the bus, device nodes of 2" in reason for reason in found.reasons)


def test_a_tool_that_lists_what_the_bus_does_not(host: Host) -> None:
    host.pci("0000:17:00.0", "10de:2330", "030200", "nvidia")
    host.nodes("/dev/nvidia0", "/dev/nvidia1")
    host.tools["nvidia-smi"] = outputs.csv("NVIDIA H100 80GB HBM3", 81559, "00000000:17:00.0", "00000000:18:00.0")
    assert [card.how for card in _only(host).cards] == [("bus", "tool"), ("tool",)]


def test_the_second_tool_is_asked_when_the_first_does_not_know(host: Host) -> None:
    host.pci("0000:17:00.0", "1002:74a1", "038000", "amdgpu", 128)
    host.nodes("/dev/dri/renderD128", "/dev/kfd")
    host.tools["amd-smi"] = Answer("failed", detail="amd-smi ended with 1: no permission")
    host.tools["rocm-smi"] = outputs.rocm("AMD Instinct MI300X", "0000:17:00.0")
    found = _only(host)
    assert [(one.command, one.ending) for one in found.asked] == [("amd-smi", "failed"), ("rocm-smi", "answered")]
    assert found.cards[0].memory_mib == 196592
    assert found.reasons == ("amd-smi: amd-smi ended with 1: no permission",)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("failed", detail="npu-smi ended with 255: dcmi"), "npu-smi: npu-smi ended with 255: dcmi"),
        (Answer("timeout", detail="npu-smi did not answer within 120 ms"), "npu-smi did not answer within 120 ms"),
        (Answer("answered", ""), "npu-smi: what it printed is not understood: no heading of npu-smi with its version"),
        (Answer("answered", "Segmentation fault"), "what it printed is not understood"),
        (Answer("answered", outputs.EFSMI), "what it printed is not understood"),
    ],
    ids=("failed", "timeout", "nothing", "crash", "another tool's"),
)
def test_a_tool_that_is_of_no_help(host: Host, answer: Answer, reason: str) -> None:
    host.pci("0000:c1:00.0", "19e5:d802", driver="devdrv_device_driver")
    host.nodes("/dev/davinci0")
    host.tools["npu-smi"] = answer
    found = _only(host)
    assert [card.chip for card in found.cards] == ["ascend-910b"]
    assert any(reason in said for said in found.reasons)


def test_tools_are_asked_at_once_and_share_one_deadline(host: Host) -> None:
    host.pci("0000:17:00.0", "10de:2330", "030200", "nvidia")
    host.pci("0000:18:00.0", "1002:74a1", "038000", "amdgpu", 128)
    host.pci("0000:19:00.0", "19e5:d802", driver="devdrv_device_driver")
    host.nodes("/dev/nvidia0", "/dev/davinci0", "/dev/kfd", "/dev/dri/renderD128")

    def slow(command: Sequence[str], seconds: float, elsewhere: Sequence[str] = ()) -> Answer:
        time.sleep(seconds)
        return Answer("timeout", detail="slow")

    start = time.monotonic()
    found = detect(PROFILES, host.root, slow, 0.3).found
    assert time.monotonic() - start < 0.8  # five tools of three vendors would take 1.2 s one after the other
    assert len(found) == 3


def test_versions_of_drivers(host: Host) -> None:
    host.pci("0000:c1:00.0", "19e5:d802", driver="devdrv_device_driver")
    host.nodes("/dev/davinci0")
    host.file("/usr/local/Ascend/driver/version.info", "Version=25.9.9\nascendhal_version=7\ntoolkit_version=1\n")
    host.file("/sys/module/devdrv_device_driver/version", "1.2\x1b[31m\n")
    host.tools["npu-smi"] = outputs.NPU_910B
    assert _only(host).drivers == {
        "devdrv_device_driver": "1.2[31m",
        "/usr/local/Ascend/driver/version.info": "25.9.9",
        "npu-smi": "25.9.9",
    }


def test_a_host_with_nothing(tmp_path: Path) -> None:
    found = _detect(Host(tmp_path))
    assert found.found == ()
    assert found.cpu_chip is None
    assert found.cpu.cores == 0
    assert found.reasons == ("/sys/bus/pci/devices is not here, so the bus says nothing",)
    cpu, accelerator = report.lines(found, PROFILES)
    assert (cpu.name, cpu.standing) == ("CPU", "works")
    assert (accelerator.standing, accelerator.text) == ("off", "none")


def test_what_every_host_has_is_no_chip(host: Host) -> None:
    assert _detect(host).found == ()
    assert host.asked == []


@pytest.mark.parametrize("text", ["", "0x", "zzzz", "0x19e5ffffffffff", "\xff", "19e5"])
def test_a_bus_that_cannot_be_read(host: Host, text: str) -> None:
    host.pci("0000:17:00.0", "19e5:d802")
    for name in ("vendor", "device", "class"):
        host.file(f"sys/bus/pci/devices/0000:17:00.0/{name}", text)
    assert _detect(host).found == ()


def test_one_vendor_may_not_be_described_twice() -> None:
    other = replace(ascend.PROFILES[0], vendor=replace(ascend.VENDOR, nodes="/dev/else"))
    with pytest.raises(PluginError, match="Huawei Ascend"):
        detect((*PROFILES, other), Path("/nonexistent"), Host(Path("/nonexistent")).run)


def test_a_chip_of_another_package(host: Host) -> None:
    """One entry is all it takes, of a vendor that is known or of a new one."""
    from deeplink.chips.profile import Pci, Profile, Vendor

    source = ascend.VENDOR.sources[0]
    vendor = Vendor("Acme", (0x1234,), ("12",), (), (source,), nodes=r"/dev/acme\d+")
    profiles = (
        *PROFILES,
        Profile("acme-1", "Acme 1", vendor, pci=(Pci((0x1,), source),)),
        Profile("ascend-next", "Ascend next", ascend.VENDOR, pci=(Pci((0xD8FF,), source),)),
    )
    host.pci("0000:17:00.0", "1234:0001", driver="acme")
    host.pci("0000:18:00.0", "19e5:d8ff", driver="devdrv_device_driver")
    host.nodes("/dev/acme0", "/dev/davinci0")
    found = detect(profiles, host.root, host.run).found
    assert sorted(card.chip or "" for one in found for card in one.cards) == ["acme-1", "ascend-next"]


@by_chip
def test_the_report_is_plain_data(host: Host, case: Case) -> None:
    if number := case.number:
        _on_bus(host, case, number)
    host.nodes(*case.nodes)
    host.tools[case.tool] = case.output
    detected = _detect(host)
    lines = report.lines(detected, PROFILES)
    assert [line.name for line in lines[1:]] == [
        next(profile.title for profile in PROFILES if profile.name == case.chip)
    ]
    back = msgspec.json.decode(msgspec.json.encode({"chips": lines, "detected": detected}))
    assert back["detected"]["found"][0]["cards"][0]["chip"] == case.chip
    for line in back["chips"][1:]:
        assert line["standing"] == "works"
        assert all(served["source"] for served in line["facts"]["served"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answers=st.lists(st.text(max_size=200), min_size=6, max_size=6))
def test_whatever_tools_print_detection_ends_with_what_the_bus_says(host: Host, answers: list[str]) -> None:
    kinds = (("19e5:d802", "devdrv"), ("10de:2330", "nvidia"), ("9999:4001", "metax"), ("1e36:c035", "enflame"))
    if not (host.root / "sys/bus/pci/devices/0000:20:00.0").exists():
        for slot, (number, driver) in enumerate(kinds):
            host.pci(f"0000:2{slot}:00.0", number, "120000" if number[:4] != "10de" else "030200", driver)
        host.nodes("/dev/davinci0", "/dev/nvidia0", "/dev/mxcd", "/dev/gcu0")
    host.tools.update(zip(("npu-smi", "nvidia-smi", "mx-smi", "efsmi", "x", "y"), answers, strict=True))
    chips = {card.chip for one in _detect(host).found for card in one.cards if "bus" in card.how}
    assert chips == {"ascend-910b", "nvidia-h100-sxm", "metax-c500", "enflame-s60"}
