"""Which sample each row belongs to: the labels of tensors, and what reads them.

In a forward, `following` sees every function of torch that runs. It asks `provenance` for the labels of the arguments,
and gives it those of the outputs. Labels are one integer where the samples are regular (`layout`), else a tensor with
the sample of each entry (`labels`). They are stored for memories, not for tensors, so that views and changes in place
are right (`memory`). Functions that move entries run once more, on the labels themselves; `operations` lists those that
leave each sample at its place. After all other functions the labels are lost.

Layers ask for the labels of their inputs. Rows whose labels are lost are found in the backward, by `probe`. Values that
all samples share, such as class tokens, have no label: in `broadcast_row`, they run sample by sample.
"""
