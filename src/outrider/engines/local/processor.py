"""The processor: its model and its instruction sets, which determine the numeric kernels."""

import platform
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# Prefixes of names; the last four are of ARM.
_INSTRUCTION_SETS = ("avx", "amx", "fma", "f16c", "sse4", "asimd", "sve", "bf16", "i8mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """``instruction_sets`` are the vector and matrix ones with Linux's names; empty if Linux lists none.
    ``vendor`` and ``family`` are those of an x86-64 processor; empty and 0 for others.
    """

    model: str
    instruction_sets: frozenset[str]
    vendor: str = ""
    family: int = 0

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether it multiplies bfloat16 at about twice the rate of float32 or more: processors with a matrix
        unit (AMX), and those of AMD with AVX512-BF16 (Zen 4 and 5). Others are not measured.
        """
        is_amd = self.vendor == "AuthenticAMD"
        return "amx_bf16" in self.instruction_sets or (is_amd and "avx512_bf16" in self.instruction_sets)

    @property
    def prefers_bfloat16_products(self) -> bool:
        """Whether attention in bfloat16 is faster as plain products than in torch's fused kernel. Measured on
        Zen 5 (family 26), where the products also have the same bits for every number of rows from two on.
        """
        return self.vendor == "AuthenticAMD" and self.family >= 26 and "avx512_bf16" in self.instruction_sets

    @property
    def lacks_blas(self) -> bool:
        """Whether MKL, torch's BLAS, is slow here: it runs AVX2 kernels on AMD processors. Half the rate of
        oneDNN from Zen 5 (family 26) on, whose units are as wide as AVX-512.
        """
        return self.vendor == "AuthenticAMD" and self.family >= 26


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
        vendor=listed.get("vendor_id", ""),
        family=int(listed.get("cpu family") or 0),
    )
