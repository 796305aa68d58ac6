"""One decode step of a DeepSeek-V4-Flash attention layer with a needle to find: ``python -m deepinfer_ops.demo``."""
