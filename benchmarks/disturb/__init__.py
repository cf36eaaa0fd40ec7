"""What `benchmarks/chaos.py` is made of: commands as processes, the work they do, faults to it."""
