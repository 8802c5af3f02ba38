"""The processor's part of ``outrider doctor``: what it has, which ways are taken, how fast it multiplies."""

import torch

from outrider.engines.local import onednn
from outrider.engines.local.machine_rate import product_rate
from outrider.engines.local.model import resolve_precision
from outrider.engines.local.processor import read_processor
from outrider.train.settings import RunSettings
from outrider.train.state.versions import chosen_instructions

DEMO_S, DEMO_TFLOP = 115, 50
"""What of ``make demo`` does not follow the float32 matrix rate, and what does. Through two measurements at
two threads (docs/benchmarks.md): 8 min 42 s at 0.122 TFLOP/s, 5 min 2 s at 0.266; set-up with cached packages
included."""
_ROWS, _LIMIT_S = 2048, 1.0


def processor() -> str:
    """Model, instruction sets, what torch uses of them, and the variables that choose otherwise."""
    info = read_processor()
    sets = " ".join(sorted(info.instruction_sets)) or "instruction sets unknown on this system"
    used = f"torch uses {torch.backends.cpu.get_cpu_capability()}"
    return "; ".join([info.model, sets, used, *chosen_instructions()])


def kernels() -> str:
    """Which way a decoding step's linear layers take in each precision, and which precision ``auto`` is."""
    ways = {
        "float32": "packed" if onednn.can_pack(torch.float32) else "plain",
        "bfloat16": "packed" if onednn.can_pack(torch.bfloat16) else "plain, slower than float32",
    }
    text = ", ".join(f"{precision} {way}" for precision, way in ways.items())
    return f'{text}; model.precision = "auto" takes {resolve_precision("auto", "cpu")}'


def matrix_rate() -> str:
    """Measured in about a second, at the threads that a run has by default, and what follows for the demo."""
    threads, before = RunSettings.model_fields["num_threads"].default, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rate = product_rate(_ROWS, torch.float32, limit_s=_LIMIT_S)
    finally:
        torch.set_num_threads(before)
    minutes = (DEMO_S + DEMO_TFLOP / rate) / 60
    text = f"{rate:.3f} TFLOP/s in float32 with {threads} threads, measured now"
    return f"{text}: make demo takes about {minutes:.0f} minutes at that"
