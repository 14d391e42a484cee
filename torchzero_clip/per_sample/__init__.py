"""Layer 3: clipping of the gradient of every sample, for the user's own model; knows nothing of Modular."""
