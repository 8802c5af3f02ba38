"""The processor: its model and its instruction sets, which determine the numeric kernels."""

import platform
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# Prefixes of names; the last four are of ARM.
_INSTRUCTION_SETS = ("avx", "amx", "fma", "f16c", "sse4", "asimd", "sve", "bf16", "i8mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """``instruction_sets`` are the vector and matrix ones with Linux's names; empty if Linux lists none."""

    model: str
    instruction_sets: frozenset[str]

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether it has a matrix unit for bfloat16 (AMX). Vector instructions are no faster than float32."""
        return "amx_bf16" in self.instruction_sets


def read_processor(cpuinfo: Path = _CPUINFO) -> Processor:
    """Describe the first processor of the machine."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    listed: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        listed.setdefault(key.strip(), value.strip())
    flags = f"{listed.get('flags', '')} {listed.get('Features', '')}".split()
    # also family and model, because clouds hide the name, and libraries choose kernels by these numbers
    telling = ("cpu family", "model", "CPU implementer", "CPU part")
    numbers = [f"{name} {listed[name]}" for name in telling if name in listed]
    return Processor(
        model=", ".join([listed.get("model name") or platform.processor() or platform.machine(), *numbers]),
        instruction_sets=frozenset(flag for flag in flags if flag.startswith(_INSTRUCTION_SETS)),
    )
