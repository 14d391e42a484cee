"""Clipping with noise."""
