"""Readers of tools' outputs: what they take out of each, and that no text makes them raise anything of their own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import outputs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.chips import output
from deeplink.chips.catalogue import PROFILES
from deeplink.chips.output import MalformedOutput
from deeplink.chips.profile import Reported

Reader = Callable[[str], tuple[Reported, ...]]
TWO = ("0000:17:00.0", "0000:18:00.0")
GOOD: tuple[tuple[Reader, str], ...] = (
    (output.npu_smi, outputs.NPU_910B),
    (output.npu_smi, outputs.NPU_910C),
    (output.npu_smi, outputs.NPU_310P),
    (output.mx_smi, outputs.mx("MetaX C500")),
    (output.query_csv, outputs.csv("NVIDIA H200", 143771, "00000000:17:00.0")),
    (output.names_csv, outputs.BRSMI),
    (output.cards_json, outputs.cards("K100_AI", *TWO)),
    (output.cards_json, outputs.rocm("AMD Instinct MI300X", *TWO)),
    (output.amd_smi, outputs.amd("AMD Instinct MI300X", *TWO)),
    (output.mthreads_gmi, outputs.mthreads("MTT S5000", *TWO)),
    (output.xpu_smi, outputs.xpu("Intel(R) Data Center GPU Max 1550", *TWO)),
    (output.efsmi, outputs.EFSMI),
    (output.cnmon, outputs.CNMON),
)
READERS = sorted({reader for reader, _ in GOOD}, key=lambda reader: reader.__name__)


def test_every_tool_of_the_catalogue_is_read_here() -> None:
    used = {tool.read for profile in PROFILES if profile.vendor for tool in profile.vendor.tools}
    assert used == set(READERS)


@pytest.mark.parametrize(
    ("reader", "text", "first"),
    [
        (output.npu_smi, outputs.NPU_910B, Reported("910B2", "0000:c1:00.0", 65536, "25.9.9")),
        (output.npu_smi, outputs.NPU_910C, Reported("Ascend910", "0000:95:00.0", 65536, "25.9.9")),
        (output.npu_smi, outputs.NPU_310P, Reported("310P3", "0000:01:00.0", 44000, "25.9.9")),
        (output.mx_smi, outputs.mx("MetaX C500"), Reported("MetaX C500", "0000:0e:00.0", 65536, "3.9.99")),
        (output.mx_smi, outputs.mx("MXC550    "), Reported("MXC550", "0000:0e:00.0", 65536, "3.9.99")),
        (
            output.query_csv,
            outputs.csv("NVIDIA H200", 143771, "00000000:AB:00.0"),
            Reported("NVIDIA H200", "0000:ab:00.0", 143771, "9.9.9"),
        ),
        (output.names_csv, outputs.BRSMI, Reported("Biren166M")),
        (output.cards_json, outputs.cards("K100_AI", *TWO), Reported("K100_AI", TWO[0], 65520)),
        (output.cards_json, outputs.rocm("AMD X", "0000:AB:00.0"), Reported("AMD X", "0000:ab:00.0", 196592)),
        (output.amd_smi, outputs.amd("AMD X", *TWO), Reported("AMD X", TWO[0], 196592, "6.9.9")),
        (output.amd_smi, outputs.amd("AMD X", *TWO, wrapped=True), Reported("AMD X", TWO[0], 196592, "6.9.9")),
        (
            output.mthreads_gmi,
            outputs.mthreads("MTT S5000", *TWO),
            Reported("MTT S5000", TWO[0], 81920, "3.9.9-server"),
        ),
        (output.xpu_smi, outputs.xpu("Intel X", *TWO), Reported("Intel X", TWO[0])),
        (output.efsmi, outputs.EFSMI, Reported("S60", "0000:27:00.0", 42976, "1.9.9.9")),
        (output.cnmon, outputs.CNMON, Reported("MLU590-M9", "0000:4f:00.0", 81920, "6.9.9")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_read(reader: Reader, text: str, first: Reported) -> None:
    found = reader(text)
    assert found[0] == first
    assert len(found) in (1, 2)


def test_two_chips_of_one_board_are_two() -> None:
    assert [one.address for one in output.npu_smi(outputs.NPU_310P)] == ["0000:01:00.0"] * 2
    assert [one.memory_mib for one in output.npu_smi(outputs.NPU_310P)] == [44000, 43000]


def test_a_tool_that_lists_nothing() -> None:
    assert output.query_csv("") == ()
    assert output.xpu_smi('{"device_list": []}') == ()
    assert output.amd_smi("[]") == ()
    assert output.mx_smi("mx-smi  version: 2.9.9\nAttached GPUs : 0\n") == ()


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (output.query_csv, "No devices were found"),
        (output.query_csv, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
        (
            output.npu_smi,
            "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi module initialize failed. ret is -8005",
        ),
        (output.npu_smi, "npu-smi Version: 1\n| 0 0 | 0000:01:00.0 | 0 1 / 2 |"),
        (output.mx_smi, "mx-smi version: 2\nsomething else"),
        (output.names_csv, "Biren166M"),
        (output.cards_json, "{}"),
        (output.cards_json, '{"card0": 1}'),
        (output.cards_json, '{"card0": {"Card Series": "BW" "PCI Bus": "x"}}'),
        (output.amd_smi, '{"error": 1}'),
        (output.amd_smi, "[1]"),
        (output.mthreads_gmi, '{"GPU": {}}'),
        (output.xpu_smi, '{"error": "Level Zero Initialization Error"}'),
        (output.efsmi, "efsmi: command failed"),
        (output.cnmon, "No MLU"),
        (output.xpu_smi, "[" * 100_000),
    ],
)
def test_what_is_not_understood_is_said(reader: Reader, text: str) -> None:
    with pytest.raises(MalformedOutput):
        reader(text)


def test_words_for_nothing_are_nothing() -> None:
    assert output.query_csv("00000000:17:00.0, [N/A], [N/A], N/A") == (Reported("", "0000:17:00.0"),)


def test_what_a_tool_says_cannot_steer_a_terminal() -> None:
    (one,) = output.query_csv(f"00000000:17:00.0, \x1b[31mX\x07\u202e{'y' * 500}, 1, 2")
    assert one.model.isprintable()
    assert len(one.model) == 80


def _check(reader: Reader, text: str) -> None:
    try:
        found = reader(text)
    except MalformedOutput:
        return
    for one in found:
        assert one.model.isprintable()
        assert one.driver.isprintable()
        assert one.address == "" or output.address(one.address) == one.address
        assert one.memory_mib is None or one.memory_mib > 0


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=400))
def test_any_text(reader: Reader, text: str) -> None:
    _check(reader, text)


@pytest.mark.parametrize(("reader", "good"), GOOD, ids=lambda value: getattr(value, "__name__", ""))
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_outputs_that_are_damaged(reader: Reader, good: str, seed: int) -> None:
    """Cut, with lines lost and swapped, and with other characters in places."""
    rng = random.Random(seed)
    lines = good.splitlines(keepends=True)
    for _ in range(rng.randrange(3)):
        lines.insert(rng.randrange(len(lines)), lines.pop(rng.randrange(len(lines))))
    if rng.random() < 0.3:
        del lines[rng.randrange(len(lines))]
    text = list("".join(lines))
    for _ in range(rng.randrange(6)):
        if text:
            text[rng.randrange(len(text))] = rng.choice("\x00|:,{}[]\"'0/9x. \n\xe9\u202e")
    _check(reader, "".join(text[: rng.randrange(len(text) + 1)] if rng.random() < 0.5 else text))


KEYS = (
    *("GPU", "card0", "card1", "device_list", "gpu_data", "asic", "bus", "vram", "size", "value", "unit", "bdf"),
    *("market_name", "PCI", "Bus ID", "PCI Bus", "Card Series", "VRAM Total Memory (B)", "driver", "FB Memory Usage"),
    *("Total", "Product Name", "pci_bdf_address", "device_name", "Driver Version"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=20,
)


@pytest.mark.parametrize(
    "reader",
    [output.cards_json, output.amd_smi, output.mthreads_gmi, output.xpu_smi],
    ids=lambda reader: reader.__name__,
)
@settings(max_examples=200, deadline=None)
@given(value=JSON)
def test_any_json(reader: Reader, value: object) -> None:
    _check(reader, json.dumps(value))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("00000000:2A:00.0", "0000:2a:00.0"),
        ("0000:2a:00.0 --> SN: 1", "0000:2a:00.0"),
        ("2a:00.1", "0000:2a:00.1"),
        ("0001:2a:1f.7", "0001:2a:1f.7"),
        ("2a:00.8", ""),
        ("", ""),
        ("GPU-1", ""),
    ],
)
def test_addresses(text: str, wanted: str) -> None:
    assert output.address(text) == wanted
