"""Clipping of the gradient of every sample, for the user's own model. It does not use `Modular`.

To read it, in this order. Each line imports from itself and earlier ones: see `LEVELS` in ``tests/test_layers.py``.

1. `norm_clippers` makes factors of norms, and `whole` finds modules that run sample by sample. `arguments`,
   `function_names`, `hooks` and `modes` are tools, and `processes` is what several processes agree on.
2. `layer`: a module of the model, with its name in errors and the way out.
3. `gradients`: what layers contribute to each parameter, with its norms and its clipped sum.
4. `samples`: the proof of which sample each row belongs to. `per_example` clips gradients that the user has.
5. `capture`: the state that all parts below share.
6. `classic`: proofs without losses. `shared_inputs`: inputs that all samples share.
7. `broadcast_row`: values that all samples share, such as parameters outside of layers. `rows_layer` is what they need
   of a layer, `beside_rows` finds the samples in tensors that such values meet, and `each_sample` runs a function for
   each.
8. `captured_layer`: what replaces the forward of a layer.
9. `rules`: how each kind of layer runs.
10. `attachment`: finds the layers of a model, and captures them.
11. `engine`: runs a backward.
12. `weighting`: makes the clipped sums.
13. `clipper`: what users call.
14. `private` adds noise, `verify` checks a model, and `opacus` has the names of Opacus.
"""
