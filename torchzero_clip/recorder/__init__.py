"""What clipping does: a record of steps, layers and losses, and a limit found from it."""
