"""torch's schedulers for settings other than the learning rate."""

from collections import UserDict
from typing import NoReturn

from torch.optim import Optimizer

from torchzero_clip.checks import instance, is_numeric
from torchzero_clip.core.group_keys import BEFORE_STEP
from torchzero_clip.modular.modular import Modular
from torchzero_clip.other_optimizer.before_step import BeforeStep
from torchzero_clip.types import Group


def as_lr(optimizer: Optimizer | BeforeStep, key: str) -> Optimizer:
    """Return a view of the optimizer for torch's schedulers, in which another setting takes the place of ``lr``.

    The schedulers of `torch.optim.lr_scheduler` take the view (`OneCycleLR` and `CyclicLR` with
    ``cycle_momentum=False``). They change the setting in all param groups, each from its own value, and are stepped and
    saved like any other scheduler. Chained schedulers must share one view: call this function once for each setting.

    Args:
        optimizer: A `Modular`, the handle of `before_step`, or any other optimizer.
        key: A setting that is a number in every param group, such as ``"max_norm"``.

    Returns:
        A view for schedulers, without parameters; it cannot take steps.

    Raises:
        ValueError: If a group lacks the setting, or the setting is not a number, or is a function of the step.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Adam, ClipNorm, Modular, as_lr
        >>> optimizer = Modular([torch.nn.Parameter(torch.ones(1))], ClipNorm(1.0), Adam())
        >>> limit = as_lr(optimizer, "max_norm")
        >>> scheduler = torch.optim.lr_scheduler.LinearLR(limit, 0.1, total_iters=100)
        >>> optimizer.param_groups[0]["max_norm"]
        0.1
    """
    runner = optimizer.runner if isinstance(optimizer, Modular | BeforeStep) else None
    if runner is None:
        instance("optimizer", optimizer, Optimizer)
    instance("key", key, str)
    key = key if runner is None else runner.nodes.storage_keys.get(key, key)
    for i, group in enumerate(optimizer.param_groups):
        if key not in group:
            settings = ", ".join(sorted(k for k, value in group.items() if is_numeric(value) and ":" not in k))
            handle = ". Those of transforms before its steps: as_lr(handle, ...)" if BEFORE_STEP in group else ""
            raise ValueError(f"param group {i} has no setting {key!r}; it has: {settings}{handle}")
        if isinstance(group[key], tuple | list) or not is_numeric(group[key]):
            raise ValueError(f"{key!r} is {group[key]!r} in param group {i}: schedulers of torch change only numbers")
    if runner is not None and key in runner.schedules:
        raise ValueError(f"{key!r} is a function of the step already: a scheduler beside it would have no effect")
    return _View(optimizer, key)


class _View(Optimizer):
    """Shows a setting as ``lr``."""

    def __init__(self, optimizer: Optimizer | BeforeStep, key: str) -> None:
        # the constructor of Optimizer is not called, because it needs parameters
        self._optimizer, self._key = optimizer, key
        self._opt_called = True  # schedulers warn if they find no step before theirs
        self.defaults = {"lr": optimizer.param_groups[0][key]}

    def __reduce__(self) -> tuple[object, ...]:
        return _View, (self._optimizer, self._key)  # schedulers are copied and pickled with what they schedule

    @property
    def param_groups(self) -> list["_Group"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups as they are now: loading a checkpoint replaces them."""
        return [_Group(group, self._key) for group in self._optimizer.param_groups]

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"{self!r} is for schedulers only: call this of the optimizer itself")

    # schedulers of torch replace a step without this mark, which raises for this one
    _refuse._wrapped_by_lr_sched = True  # pyright: ignore
    step = zero_grad = state_dict = load_state_dict = add_param_group = _refuse  # pyright: ignore

    def __repr__(self) -> str:
        return f"as_lr({type(self._optimizer).__name__}, {self._key!r})"


class _Group(UserDict[str, object]):
    """A param group that stores ``lr`` under the key of another setting, and ``initial_lr`` as ``"key:initial_lr"``."""

    def __init__(self, group: Group, key: str) -> None:
        self.data, self._key = group, key

    def _stored(self, key: str) -> str:
        return self._key if key == "lr" else f"{self._key}:{key}" if key.endswith("_lr") else key

    def __contains__(self, key: object) -> bool:
        return self._stored(str(key)) in self.data

    def __getitem__(self, key: str) -> object:
        return self.data[self._stored(key)]

    def __delitem__(self, key: str) -> None:
        del self.data[self._stored(key)]

    def __setitem__(self, key: str, value: object) -> None:
        if key == "lr":  # not initial_lr, because some schedulers do not store it, and some store another number
            self.data.setdefault(f"{self._key}:constructed", self.data[self._key])
        self.data[self._stored(key)] = value
