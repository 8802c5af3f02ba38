"""Imports and results that the parent of :mod:`tests.training.forked` computes once for its children.

It runs with one thread, so that a fork loses none.
"""

import bm25s  # noqa: F401
import numpy.ctypeslib  # noqa: F401
import pandas  # noqa: F401
import pyarrow.dataset
import pyarrow.pandas_compat
import pyarrow.parquet  # noqa: F401
import torch
import transformers.models.llama.modeling_llama
import transformers.tokenization_utils_fast  # noqa: F401
from transformers import conversion_mapping

from outrider.engines.local.cpu_kernels import can_pack
from outrider.training import setup as launch  # noqa: F401
from outrider.viewer import report  # noqa: F401

torch.set_num_threads(1)
can_pack(torch.float32)
# it caches a table of a thousand patterns
if hasattr(conversion_mapping, "get_checkpoint_conversion_mapping"):
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
