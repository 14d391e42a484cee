"""The optimizer, and other ways to take steps.

* `modular` is the optimizer. Its `runner` takes steps through a chain, and `param_groups` makes groups.
* `before_step` puts a runner before the steps of another optimizer, in which `followed`, `placed`, `entries` and `host`
  find settings and store state.
* `in_backward` takes steps of parts while a backward runs.
* `captured` replays the steps of an optimizer as a CUDA graph.
"""
