"""Transforms that clip."""
