"""Layer 3: transforms that turn gradients into updates, as torch's optimizers do."""
