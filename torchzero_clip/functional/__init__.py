"""Functions on tensors, without state."""
