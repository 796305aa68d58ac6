"""The operators on AWS Neuron: compositions of torch operators and NKI kernels. See docs/neuron.md.

Importing it registers them; it needs nothing but torch.
"""

from .explain import explain
from .registration import register

register()

__all__ = ["explain"]
