"""What the callbacks of trainers do with an optimizer when training starts."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from torch import nn

from torchzero_clip.compat import warn_user
from torchzero_clip.core.chain import Transforms
from torchzero_clip.modular.before_step import BeforeStep, before_step, chain_of

Given: TypeAlias = "Transforms | Callable[[Any], BeforeStep]"
"""Transforms, or a function that puts them before the steps of an optimizer."""


def attached(given: Given, current: Collection[BeforeStep | None], optimizer: Any, model: nn.Module) -> BeforeStep:
    """Put transforms before the steps of an optimizer, unless the callback has done so for an earlier run."""
    found = chain_of(optimizer)
    if isinstance(found, BeforeStep) and found in current:
        return found
    handle = given(optimizer) if callable(given) else before_step(optimizer, given, module=model)
    if not isinstance(handle, BeforeStep):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"the function in transforms= must return a handle, got {type(handle).__name__}: write "
            "transforms=lambda optimizer: before_step(optimizer, ...)"
        )
    return handle


def check_trained(optimizers: Sequence[Any], model: nn.Module, *, raises: bool) -> None:
    """Warn of trainable parameters that the optimizers lack. With ``raises``, raise if they lack all of them."""
    held = {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    trainable = {name: id(param) for name, param in model.named_parameters() if param.requires_grad}
    left = [name for name, param in trainable.items() if param not in held]
    shown = ", ".join(map(repr, left[:3])) + ", ..." * (len(left) > 3)
    of = f"of the {len(trainable)} trainable parameters of the model"
    if raises and left and len(left) == len(trainable):
        raise ValueError(
            f"the optimizer has none {of} ({shown}), so training would change nothing: make it of the model that is "
            "trained. With peft, call get_peft_model first, and pass its model to the trainer and to the optimizer"
        )
    if left:
        warn_user(f"the optimizer does not have {len(left)} {of}, which are not trained: {shown}")
