"""What a trained model leaks, measured: canaries, scores, bounds."""
