"""What a step costs on a GPU, in one run of a few minutes: ``python -m benchmarks.device``."""
