"""Rules that compute per-sample gradients, with one file for each kind of layer."""
