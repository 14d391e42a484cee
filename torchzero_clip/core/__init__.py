"""The mechanism that chains transforms into an optimizer. `LR` is the only transform that it uses by name.

* `transform`, `kinds` and `elementwise` have the base classes, and `step` what a transform sees of a step.
* `chain` joins transforms. `nodes` says where each stores its settings and state, `scope` on which parameters it acts,
  and `group_keys` which keys of param groups mean something.
* `states` is the state of the parameters of a transform, and `chain_state` that of the whole chain. `undo` notes both.
* `schedules` and `learning_rate` change settings from step to step.
"""
