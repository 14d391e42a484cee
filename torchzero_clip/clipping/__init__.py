"""Layer 3: transforms that clip."""
