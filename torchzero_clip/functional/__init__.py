"""Layer 1: tensors in, tensors out; no classes of ours, no state."""
