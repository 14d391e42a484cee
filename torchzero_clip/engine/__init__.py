"""One step through a chain: the walk, and the readable way to carry it out."""
