"""Encoders: found, loaded, with a linear head; and what a frozen one gives for every record."""
