"""From the optimizers of torch to a chain, and back."""
