"""Which sample each row belongs to, found by a probe and remembered as a pattern.

A layer keeps its input and the gradient of its output, and needs the sample of each row. The forward does not tell it.
In `backward(losses)`:

1. `probe.Graph` walks the graph once: it finds the calls of layers, a hash of the functions in it, and whether some of
   them may move rows by values, such as ``x[index]``.
2. If all places are remembered for this hash, nothing moves rows, and no proof is due, there is one backward.
3. Else further backwards of the losses times powers of two show the sample of each row, and prove that no row belongs
   to several samples. One more, of NaN for half of the samples, shows where values decide: NaN times 0 is NaN. Such
   graphs are probed in every step.
4. If the rows of a layer are regular, a `patterns.Pattern` is remembered: the dimension that holds the samples.

In the classic form, the probe starts in a hook of the outputs of the model, with their gradients times the powers.
Values that all samples share, such as embeddings of positions, are a `broadcast_row`.
"""
