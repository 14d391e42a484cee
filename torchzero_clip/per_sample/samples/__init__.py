"""Whose row is it: which sample each row of a layer belongs to, proved by the gradient.

The backward runs once more, with the loss of each sample times a power of two. The gradient of a row must then be
multiplied by the power of its sample: this is a *proof*. Another ratio means that the row belongs to several samples.

To read it, in this order:

1. `pattern` is what is kept of a proof: the place of the samples in each `call` of a layer, for batches of any size.
2. `powers` has the factors, and reads samples from ratios.
3. `graph_nodes` says which functions may move rows by values that are not in the hash of the graph, so that each step
   has to be proved. `graph` walks from the losses to the layers. A proof holds while the hash stays the same.
   `choosing` lets NaN through functions that choose by values.
4. `proof` runs the further backwards for one graph, and finds where the samples of each call are.
5. `prover` decides which backwards are proved. `errors` has the errors.

These places decide whose a row is:

* a guess of the forward: `CapturedLayer.find_samples` for the input of a layer, `beside_rows` beside a bare parameter,
  `GenericRule.dims` for a module that runs whole. A proof refuses a wrong guess
* a proof: `Powers.samples` reads the sample of each row, and `Proof._learn` stores the place of all of them
* an earlier proof: `Prover.planned`, in steps without one
* inputs that all samples share: `SharedInputs` recognizes those that a proof has found, in later forwards
* the classic form: `Classic.contributions`, by the same proofs

Above this folder, `classic` proves from the outputs of the model, where the losses are not known. Values that all
samples share, such as a bare parameter, are copied for each sample: see `broadcast_row`.
"""
