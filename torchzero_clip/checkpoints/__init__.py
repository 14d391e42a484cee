"""Checkpoints: to which chain they belong, whether they fit, and how they are converted."""
