"""Gradients of samples, and their norms."""
