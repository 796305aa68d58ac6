"""Speed of the CPU operators, as ratios measured in one process: ``python -m benchmarks`` (docs/performance.md)."""
