"""The optimizer.

* `modular` is the optimizer. Its `runner` takes steps through a chain, `param_groups` makes groups, and `validation`
  checks what users pass.
* `classes`, `described` and `origin` are about the optimizer as an object: classes made of a chain, its text, and the
  module that its parameters are of.
* `in_backward` takes steps of parts while a backward runs.
* `wrappers` finds the optimizer inside the wrappers of trainers.
"""
