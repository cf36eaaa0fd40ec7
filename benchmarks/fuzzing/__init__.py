"""What `benchmarks/fuzz.py` is made of: odd values, cases made of them, how a case is judged."""
