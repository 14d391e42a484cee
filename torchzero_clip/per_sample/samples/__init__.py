"""Which sample each row belongs to: the labels of tensors, and what reads them.

A layer needs the sample of each row that it gets, also after ``x.flatten(0, 1)`` or ``x[mask]``. So a forward also
finds the *labels* of each tensor: the sample of each entry. With 2 samples of 3 positions, ``x`` of shape (2, 3) has
the labels ((0, 0, 0), (1, 1, 1)).

* Entry k of this ``x``, flattened, belongs to sample k // 3 % 2. Such labels are regular, and stored as an integer, the
  *step*, here 3. The labels of ``x[mask]`` may be (0, 0, 1), which are stored as a tensor: see `labels`.
* Labels are None for values that depend on no sample, such as parameters, and `LOST` if they are not known.
* They are stored for the memory of a tensor, so that views and changes in place are right: see `memory`. The *owners*
  of a memory are the samples of its entries.

In a forward:

1. `following` sees every function of torch that runs. It asks `provenance` for the labels of the arguments, finds those
   of the outputs, and gives them to `provenance`, which stores them.
2. `operations` lists functions that leave each sample at its place, such as ``x.sum(-1)``. Functions that move entries,
   such as ``cat``, run once more, on the labels. Functions in no list are followed into the operations that they
   consist of. If these are in no list either, labels are lost.
3. A layer asks for the labels of its input. If they are lost, `probe` finds the samples in the backward.
4. Outputs of layers without samples, such as embeddings of positions, are a `broadcast_row`: a value that all samples
   share, with a copy for each sample, so that each one has a gradient.

Read `labels`, `memory` and `provenance` first, then `operations` and `following`. `probe` and `broadcast_row`
can be read alone. `arguments` and `comparison` have small helpers.
"""
