"""Records the gradients, layers and losses of each step, and finds a limit from the record."""
