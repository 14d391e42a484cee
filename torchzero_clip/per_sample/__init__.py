"""Layer 3: clipping of the gradient of every sample, for the user's own model. It does not use Modular."""
