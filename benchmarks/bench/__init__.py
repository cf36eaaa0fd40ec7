"""The parts of `benchmarks/bench.py`."""
