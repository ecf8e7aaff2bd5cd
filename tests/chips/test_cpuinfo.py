"""What processors say of themselves. Hand-made texts, in the form of /proc/cpuinfo."""

from __future__ import annotations

import pytest
from host import Host
from hypothesis import given
from hypothesis import strategies as st

from deeplink.chips import cpuinfo
from deeplink.chips.catalogue import PROFILES
from deeplink.chips.detect import detect

AVX512 = "fpu sse4_2 fma avx2 avx512f avx512_bf16 avx512_vnni"
AMX = f"{AVX512} amx_bf16 avx512_fp16 amx_tile amx_int8"


def x86(flags: str, cores: int = 2) -> str:
    one = "vendor_id\t: GenuineIntel\nmodel name\t: A  Processor @ 1GHz\nflags\t\t: {}\nbugs\t\t: none\n\n"
    return "".join(f"processor\t: {core}\n{one.format(flags)}" for core in range(cores))


ARM = (
    "processor\t: 0\nBogoMIPS\t: 200.00\nFeatures\t: fp asimd evtstrm asimddp sve bf16 i8mm\n"
    "CPU implementer\t: 0x48\nCPU part\t: 0xd02\n\n"
)


@pytest.mark.parametrize(
    ("text", "chip", "isa", "amx"),
    [
        (x86(AMX), "cpu-x86-amx", "avx512f", ("amx_tile", "amx_bf16", "amx_int8")),
        (x86(AVX512), "cpu-x86", "avx512_bf16", ()),
        (x86("fpu sse4_2"), "cpu-x86", "sse4_2", ()),
        (x86(f"{AVX512} amx_tile amx_int8"), "cpu-x86", "avx2", ("amx_tile", "amx_int8")),
        (ARM, "cpu-arm", "sve", ()),
    ],
)
def test_instruction_sets(tmp_path, text: str, chip: str, isa: str, amx: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    host = Host(tmp_path)
    host.file("proc/cpuinfo", text)
    found = detect(PROFILES, host.root, host.run)
    assert found.cpu_chip == chip
    assert isa in found.cpu.isa
    assert found.cpu.amx == amx


def test_cores_are_those_that_are_online(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Of a large host only the first processors are read."""
    host = Host(tmp_path)
    host.file("proc/cpuinfo", x86(AMX, 1000))
    host.file("sys/devices/system/cpu/online", "0-511,1024-1025,2000\n")
    assert cpuinfo.cpu(host.root).cores == 515
    assert cpuinfo.cpu(host.root).model == "A Processor @ 1GHz"


@pytest.mark.parametrize("online", ["", "x", "0-", "9-1x", "0-99999999999999999999"])
def test_a_list_of_cores_that_is_none(online: str) -> None:
    assert cpuinfo.parse(x86(AMX), online).cores == 2


@given(st.text(), st.text())
def test_any_text(text: str, online: str) -> None:
    found = cpuinfo.parse(text, online)
    assert found.family in ("", "x86", "arm")
    assert found.model.isprintable()
