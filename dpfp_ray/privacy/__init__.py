"""What a run costs, and the randomness it costs that with: sampling, accounting, statements."""
