"""The mechanism that chains transforms into an optimizer. `LR` is the only transform that it uses by name."""
