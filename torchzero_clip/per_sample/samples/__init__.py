"""Whose row is it: which sample each row of a layer belongs to, proved by the gradient.

The losses of samples, times powers of two, are sent backward once more. The gradient of a row is then multiplied by the
power of its sample, and of no other: this is a *proof*. Another ratio means that the row belongs to several samples.

1. `powers` has the factors, and reads samples from ratios.
2. `proof` runs the further backwards for one graph, and finds where the samples of each `call` are.
3. `graph` walks from the losses to the layers. Its hash says how long a proof holds. `nodes` says which functions may
   move rows by values that are not in the hash, so that each step has to be proved.
4. `pattern` is what is kept of a proof: the place of the samples in each call, for batches of any size.
5. `prover` decides which backwards are proved. `classic` does it from the outputs of the model, where nobody has the
   losses. `refusals` are the errors.

Values that all samples share, such as a bare parameter, have a copy for each of them: see `broadcast_row`. `arguments`
and `comparison` have small helpers.
"""
