"""Per-sample clipping in several processes."""
