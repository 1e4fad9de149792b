"""Training: the loop, its state and its log."""
