"""Transforms that turn gradients into updates, as torch's optimizers do."""
