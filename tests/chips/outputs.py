"""What vendors' tools print, for the tests.

Hand-made: no such device was at hand. The shapes (headings, columns, keys, units) are those of outputs that are public,
named in `deeplink.chips.sources`; cards, addresses, numbers and versions are made up.
"""

from __future__ import annotations

import json

NPU_910B = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.9.9                   Version: 25.9.9                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B2               | OK            | 90.1        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3400 / 65536         |
+===========================+===============+====================================================+
| 1     910B2               | OK            | 91.7        41                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3401 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
| 1       0                 | 4711          | python                   | 1200                    |
+===========================+===============+====================================================+
"""

NPU_910C = """\
| npu-smi 25.9.9                   Version: 25.9.9                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 2     Ascend910           | OK            | 163.0       40                0    / 0             |
| 0     4                   | 0000:95:00.0  | 0           0    / 0          2900 / 65536         |
| 2     Ascend910           | OK            | -           41                0    / 0             |
| 1     5                   | 0000:97:00.0  | 0           0    / 0          2880 / 65536         |
"""

NPU_310P = """\
| npu-smi 25.9.9                                   Version: 25.9.9                                       |
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
| 1       310P3                 | OK              | NA           49                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1400 / 44000                            |
| 1       310P3                 | OK              | NA           45                0     / 0             |
| 1       1                     | 0000:01:00.0    | 0            1500 / 43000                            |
"""


def mx(model: str) -> str:
    return f"""\
mx-smi  version: 2.9.9

=================== MetaX System Management Interface Log ===================
Timestamp                                         : Sun Nov 29 12:00:00 2026

Attached GPUs                                     : 2
+---------------------------------------------------------------------------------+
| MX-SMI 2.9.9                        Kernel Mode Driver Version: 3.9.99          |
| MACA Version: 3.9.9.9               BIOS Version: 1.9.9.9                       |
|------------------+-----------------+---------------------+----------------------|
| Board       Name | GPU   Persist-M | Bus-id              | GPU-Util      sGPU-M |
| Pwr:Usage/Cap    | Temp       Perf | Memory-Usage        | GPU-State            |
|==================+=================+=====================+======================|
| 0     {model} | 0           Off | 0000:0e:00.0        | 0%          Disabled |
| 48W / 350W       | 37C          P0 | 858/65536 MiB       | Available            |
+------------------+-----------------+---------------------+----------------------+
| 1     {model} | 1           Off | 0000:0f:00.0        | 0%          Disabled |
| 49W / 350W       | 36C          P0 | 858/65536 MiB       | Available            |
+------------------+-----------------+---------------------+----------------------+
| Process:                                                                        |
|  no process found                                                               |
"""


def csv(model: str, mib: int, *addresses: str) -> str:
    return "".join(f"{address}, {model}, {mib}, 9.9.9\n" for address in addresses)


BRSMI = "0, Biren166M\n1, Biren166M\n"


def cards(model: str, *addresses: str) -> str:
    """hy-smi."""
    return json.dumps(
        {
            f"card{number}": {
                "Card Series": model,
                "Card Vendor": "C-3000 IC Design Co., Ltd.",
                "PCI Bus": f"{address} --> SN: 0 --> OAM ID: {number}",
                "vram Total Memory (MiB)": "65520",
                "vram Total Used Memory (MiB)": "2",
            }
            for number, address in enumerate(addresses)
        }
    )


def rocm(model: str, *addresses: str) -> str:
    return json.dumps(
        {
            **{
                f"card{number}": {
                    "Card Series": model,
                    "PCI Bus": address.upper(),
                    "VRAM Total Memory (B)": str(196592 << 20),
                }
                for number, address in enumerate(addresses)
            },
            "system": {"Driver version": "6.9.9"},
        }
    )


def amd(model: str, *addresses: str, wrapped: bool = False) -> str:
    devices = [
        {
            "gpu": number,
            "asic": {"market_name": model, "device_id": "0x74a1"},
            "bus": {"bdf": address},
            "vram": {"type": "HBM3", "size": {"value": 196592, "unit": "MB"}},
            "driver": {"name": "amdgpu", "version": "6.9.9"},
        }
        for number, address in enumerate(addresses)
    ]
    return json.dumps({"gpu_data": devices} if wrapped else devices)


def mthreads(model: str, *addresses: str) -> str:
    return json.dumps(
        {
            "Timestamp": "Sun Nov 29 12:00:00 2026",
            "Driver Version": "3.9.9-server",
            "Attached GPUs": str(len(addresses)),
            "GPU": [
                {
                    "Index": str(number),
                    "Product Name": model,
                    "PCI": {"Bus ID": f"0000{address}", "Device ID": "0x0400"},
                    "FB Memory Usage": {"Total": "81920MiB", "Used": "0MiB"},
                }
                for number, address in enumerate(addresses)
            ],
        }
    )


def xpu(model: str, *addresses: str) -> str:
    return json.dumps(
        {
            "device_list": [
                {"device_id": number, "device_name": model, "device_type": "GPU", "pci_bdf_address": address}
                for number, address in enumerate(addresses)
            ]
        },
        indent=4,
    )


EFSMI = """\
-------------------------------------------------------------------------------
--------------------- Enflame System Management Interface ---------------------
--------- Enflame Tech, All Rights Reserved. 2024-2025 Copyright (C) ----------
-------------------------------------------------------------------------------
DEV ID 0
    Driver Info
        Ver                     : 1.9.9.9
    Device Info
        Dev Name                : S60
        Dev SN                  : A0
        Health                  : True
    PCIe Info
        Vendor ID               : 1e36
        Device ID               : c035
        Domain                  : 0000
        Bus                     : 27
        Dev                     : 00
        Func                    : 0
        Link Info
        Max Link Speed          : Gen5
    Device Mem Info
        Total Size              : 42976 MiB
        Used Size               : 0 MiB
DEV ID 1
    Driver Info
        Ver                     : 1.9.9.9
    Device Info
        Dev Name                : S60
    PCIe Info
        Domain                  : 0000
        Bus                     : 28
        Dev                     : 00
        Func                    : 0
    Device Mem Info
        Mem Size                : 42976 MiB
-------------------------------------------------------------------------------
"""

CNMON = """\
Sun Nov 29 12:00:00 2026
+------------------------------------------------------------------------------+
| CNMON v6.9.9                                                   Driver v6.9.9 |
+-------------------------------+----------------------+-----------------------+
| Card  VF  Name       Firmware |               Bus-Id | Util        Ecc-Error |
| Fan   Temp      Pwr:Usage/Cap |         Memory-Usage | Mode     Compute-Mode |
|===============================+======================+=======================|
| 0     /   MLU590-M9    v1.1.1 |         0000:4F:00.0 | 0%                  0 |
|  0%   35C        105 W/ 550 W |     0 MiB/ 81920 MiB | FULL          Default |
+-------------------------------+----------------------+-----------------------+
| 1     /   MLU590-M9    v1.1.1 |         0000:50:00.0 | 0%                  0 |
|  0%   35C        104 W/ 550 W |     0 MiB/ 81920 MiB | FULL          Default |
+-------------------------------+----------------------+-----------------------+
"""
