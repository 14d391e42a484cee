"""How single kinds of layers give the gradient of every sample: one file each."""
