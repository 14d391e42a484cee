"""Functions on tensors, without state.

* For users: `grads` clips and normalizes ``.grad``, and `norms` measures them. Its table lists the other files that
  measure, such as `slices`, `blocks` and `moments`.
* For transforms: `clip` finds factors, `measure` the norms that they need, and `metric` says of which kind.
* Below: `foreach` is the only file that calls ``torch._foreach_*``. `shards` and `processes` are about tensors and
  numbers of several processes, `scratch` keeps memory between steps, and `ways` and `dtypes` say what a device can do.
"""
