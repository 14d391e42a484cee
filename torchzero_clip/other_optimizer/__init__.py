"""Transforms before the steps of any optimizer, and replays of its steps.

* `before_step` puts a runner before the steps of another optimizer. `wrapping` checks the optimizer and wraps its
  methods, `followed` has the settings for its groups, `placed` stores state beside that of the optimizer, and `entries`
  saves and loads both.
* `captured` replays the steps of an optimizer, which may be a `Modular`, as a CUDA graph.
"""
