"""What several methods share: the interface, clipping, closed-form heads."""
