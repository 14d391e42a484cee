"""Records the gradients, layers and losses of each step, and finds a limit from the record.

* Recording: `recorder` is what users make. `recording` takes the steps, `tape` keeps the last ones on the device, and
  `output` writes them to `files` and sends them `live` to a logger. `step_hooks` measures optimizers that are not a
  `Modular`. `recorded_params` has names and layers, `measurable` says which tensors have norms, `precision` how
  precisely gradients were computed, and `saved` checks a state before it is loaded.
* Reading: `record` is what users get, also by `reading` a file. It is made of `data`, `series` judges norms in the
  order of their steps, `suggestion` finds a limit, `two_runs` compares, and `arithmetic` has what they compute.
* Showing: `figures` draws `panels` of what `binning` reduces to columns. `report` writes a `page` with the tables of
  `worst`, and `words` makes text of numbers.
"""
