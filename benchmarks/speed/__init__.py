"""The parts of `benchmarks/bench.py`; mypy asks that they are not called `bench`, too."""
