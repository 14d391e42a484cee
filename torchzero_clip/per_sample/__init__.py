"""Clipping of the gradient of every sample, for the user's own model. It does not use `Modular`.

1. `clipper` is what users call. `attachment` finds the layers of the model, and `captured_layer` keeps what each was
   called with.
2. `engine` runs a backward. `rules` says how each kind of layer runs, and `samples` which sample each row belongs to.
3. `gradients` has norms and sums. `norm_clippers` makes factors of the norms, and `weighting` the clipped sums.
4. `private` adds noise, `processes` is what several processes agree on, and `opacus` has the names of Opacus.

Each file and folder imports only from earlier rows of `LEVELS` in ``tests/test_layers.py``.
"""
