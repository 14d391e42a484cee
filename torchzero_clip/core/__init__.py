"""Layer 2: the mechanism that chains transforms into an optimizer. It names no transform but the learning rate."""
