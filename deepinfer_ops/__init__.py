"""deepinfer_ops: the sparse-attention operators of a DeepSeek-V4-class LLM engine.

Importing the package registers ``torch.ops.deepinfer.{flash_mla_decode, paged_mqa_logits, softmax_pool}`` with schemas
and fake functions, the CPU kernels, and the Neuron composition. It imports nothing beyond torch.
"""

from . import config, neuron
from .flash_mla_decode import flash_mla_decode
from .library import load_cpu_kernels
from .packers import dequantize_kv, quantize_kv, write_kv
from .packers_index import dequantize_index, index_planes, quantize_index, quantize_index_query, write_index
from .paged_mqa_logits import paged_mqa_logits
from .softmax_pool import softmax_pool
from .version import __version__

HAS_CPU_KERNELS = load_cpu_kernels()
"""Whether the compiled CPU kernels were found and loaded."""

__all__ = [
    "HAS_CPU_KERNELS",
    "__version__",
    "config",
    "dequantize_index",
    "dequantize_kv",
    "flash_mla_decode",
    "index_planes",
    "neuron",
    "paged_mqa_logits",
    "quantize_index",
    "quantize_index_query",
    "quantize_kv",
    "softmax_pool",
    "write_index",
    "write_kv",
]
