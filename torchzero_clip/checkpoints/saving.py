"""Saves and loads what a chain has: settings in param groups, state by parameter, and state of the whole chain."""

from collections.abc import Generator, Iterable, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from torchzero_clip.checkpoints.adapt import adapted
from torchzero_clip.checkpoints.fitting import fitted
from torchzero_clip.checkpoints.identity import IDENTITY, identity_text, members_of
from torchzero_clip.compat import warn_user
from torchzero_clip.core.chain_state import ChainState
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.schedules import Schedules
from torchzero_clip.functional.lists import params_of
from torchzero_clip.functional.processes import device_of, gathered
from torchzero_clip.functional.shards import largest_on_all_ranks
from torchzero_clip.types import Checkpoint, Group, NewState, State, StateDict

DEVICE = "device"
"""A key of saved states that are numbers alone: under it, each parameter has a tensor of one element.

To load a full state dict, torch.distributed.checkpoint asks for the checkpoint of the optimizer and takes the device of
the first tensor with a dimension. Without one it raises "Expected device to be set", in torch 2.13 also for
`torch.optim.SGD` without momentum. It also drops the entries of parameters whose state is {}.
"""


def new_chain_state(nodes: Nodes, counts: Mapping[str, int]) -> ChainState:
    """The state of the whole chain before the first step, with counters and the description of the chain."""
    return ChainState({**nodes.init_global_state(), **counts}, {IDENTITY: identity_text(members_of(nodes))})


def complete(saved: StateDict, groups: Sequence[Group], chain_state: ChainState) -> None:
    """Add the state of the whole chain to the checkpoint that torch has made of these groups."""
    # as in torch, tensors are not copied. If some were, a checkpoint in memory would mix the state of two steps
    chain_state.adopt_counters(groups)
    chain_state.show(saved["param_groups"])
    values = [value for state in saved["state"].values() for value in state.values()]
    if saved["state"] and not any(isinstance(value, Tensor) and value.ndim for value in values):
        tensor = torch.zeros(1, dtype=torch.float32, device=device_of(params_of(groups)))
        saved["state"] = {i: {**state, DEVICE: tensor} for i, state in saved["state"].items()}


def without_device(saved: Checkpoint) -> Checkpoint:
    """Remove what `complete` has added under `DEVICE`."""
    states = saved.get("state")
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        return saved  # not a checkpoint, as `adapted` says
    return {**saved, "state": {i: {k: v for k, v in state.items() if k != DEVICE} for i, state in states.items()}}


@dataclass
class Load:
    """One load of a checkpoint, by `hooked`. All processes check it before any of them changes something."""

    nodes: Nodes
    schedules: Schedules
    chain_state: ChainState
    process_group: ProcessGroup | None
    new: str | Iterable[str]
    dropped: str | Iterable[str]
    _was_checked: bool = field(default=False, init=False)
    _fitting: Checkpoint = field(default_factory=dict, init=False)
    _values: NewState = field(default_factory=dict, init=False)

    @contextmanager
    def hooked(self, optimizer: Optimizer) -> Generator[None]:
        """Check and restore while torch loads: after the pre-hooks of the caller, and before its post-hooks."""
        before = optimizer.register_load_state_dict_pre_hook(
            # without the state by parameter, which torch would cast, and `restore` puts in its place
            lambda loading, state_dict: {**self.check(state_dict, loading.param_groups), "state": {}}
        )
        after = optimizer.register_load_state_dict_post_hook(
            lambda loading: self.restore(loading.param_groups, loading.state), prepend=True
        )
        try:
            yield
        except Exception:
            if not self._was_checked:  # a hook failed, or this is not a checkpoint. Others wait in `check`
                self._fails_somewhere(True, optimizer.param_groups)
            raise
        finally:
            before.remove()
            after.remove()

    def check(self, state_dict: Checkpoint, groups: list[Group]) -> Checkpoint:
        """Return the checkpoint, converted and completed. Raises on all processes if it does not fit on one of them."""
        error: Exception | None = None
        try:
            adjusted = adapted(without_device(state_dict), groups, self.nodes, self.new, self.dropped)
            self._fitting, self._values = fitted(adjusted, groups, self.nodes, self.schedules, self.chain_state.values)
        except ValueError as raised:
            error = raised
        except Exception as raised:  # any kind, because schedules are functions of the user
            error = ValueError(f"the checkpoint does not fit: {raised}")
            error.__cause__ = raised
        self.agree(error, groups)
        self._compare_limits(groups)
        return self._fitting

    def _compare_limits(self, groups: Sequence[Group]) -> None:
        """Warn if the constructor says another limit than the checkpoint, whose limit is used."""
        differ: dict[str, str] = {}
        for group, loaded in zip(groups, self.groups, strict=True):
            for key in (stored for node in self.nodes for stored in _limits(node)):
                # as_lr lets schedulers change a limit, and stores that of the constructor
                constructed, saved = (of.get(f"{key}:constructed", of[key]) for of in (group, loaded))
                if not isinstance(constructed, Tensor) and not isinstance(saved, Tensor) and constructed != saved:
                    differ.setdefault(key, f"{key} is {saved} in the checkpoint and {constructed} in the constructor")
        if differ:
            way_out = "The number of the checkpoint is used. To change it, set it in param_groups after loading"
            warn_user(f"{'; '.join(differ.values())}. {way_out}")

    def agree(self, error: Exception | None, groups: Sequence[Group]) -> None:
        """Raise on all processes if there is an error on one of them. All have to call this."""
        self._was_checked = True
        if self._fails_somewhere(error is not None, groups):
            elsewhere = "the checkpoint does not fit on another rank, whose error says why. No rank has loaded it"
            raise error or ValueError(elsewhere)

    @property
    def groups(self) -> list[Group]:
        """The param groups of the checkpoint, converted and completed by `check`."""
        return self._fitting["param_groups"]

    def restore(self, groups: Sequence[Group], state: MutableMapping[Tensor, State]) -> None:
        """Put the state of the checkpoint in its place, after its groups were loaded."""
        state.clear()  # also that of parameters that the checkpoint lacks
        ids = [i for group in self.groups for i in group["params"]]
        for i, param in zip(ids, params_of(groups), strict=True):
            if i in self._fitting["state"]:
                state[param] = self._fitting["state"][i]
        self.chain_state.values.update(self._values)
        self.chain_state.move(groups)
        self.chain_state.show(groups)

    def _fails_somewhere(self, fails: bool, groups: Sequence[Group]) -> bool:
        """True if loading fails in any process. All processes have to call this, because they wait for each other."""
        params = params_of(groups)
        failures = largest_on_all_ranks(torch.tensor([float(fails)], dtype=torch.float64, device="cpu"), params)
        if self.process_group is not None:
            failures = gathered(failures.to(device_of(params, self.process_group)), self.process_group).amax()
        return failures.item() > 0


def _limits(node: Node) -> list[str]:
    """The keys of param groups under which the limits of a transform are stored, without schedules."""
    transform, keys = node.transform, node.storage_keys.items()
    # beside the declared one, transforms have other limits, with names such as max_ratio
    limits = {stored: key for key, stored in keys if key.startswith("max_") or key == transform.limit_setting}
    return [stored for stored, key in limits.items() if key not in transform.schedules]
