"""What the callbacks of trainers do with an optimizer when training starts."""

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from torchzero_clip.checks import instance
from torchzero_clip.core.chain import Transforms, flatten
from torchzero_clip.modular.before_step import BeforeStep, before_step, handle_of
from torchzero_clip.modular.modular import Modular
from torchzero_clip.modular.wrapped import unwrap

Given: TypeAlias = "Transforms | Callable[[Any], BeforeStep]"
"""Transforms, or a function that puts them before the steps of an optimizer."""


def chain_of(optimizer: Any) -> Modular | BeforeStep | None:
    """The transforms of an optimizer that a trainer may have wrapped; None if it has none."""
    if isinstance(optimizer, BeforeStep):
        return optimizer
    found = unwrap(optimizer)
    return found if isinstance(found, Modular) else handle_of(found) if isinstance(found, Optimizer) else None


def check_transforms(given: Given) -> None:
    """Raise if a callback cannot put what it was given before the steps of an optimizer."""
    if not callable(given):
        list(flatten([given]))


def attached(given: Given, current: Collection[BeforeStep | None], optimizer: Any, model: nn.Module) -> BeforeStep:
    """Put transforms before the steps of an optimizer. It keeps those that the callback gave it for an earlier run."""
    found = chain_of(optimizer)
    if isinstance(found, BeforeStep) and found in current:
        return found
    if not callable(given):
        return before_step(optimizer, given, module=model)
    made = given(optimizer)
    instance("what the function transforms= returns", made, BeforeStep, "write lambda o: before_step(o, ZClip())")
    return made


def check_trained(optimizers: Sequence[Any], model: nn.Module, *, raises: bool) -> None:
    """Name trainable parameters of a model that the optimizers do not have; if they have none, raise if asked to."""
    held = {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    left = [name for name, param in trainable.items() if id(param) not in held]
    if not left:
        return
    shown = ", ".join([*map(repr, left[:3]), *(["..."] if len(left) > 3 else [])])
    of = f"of the {len(trainable)} trainable parameters of the model"
    if len(left) == len(trainable) and raises:
        raise ValueError(
            f"the optimizer has none {of} ({shown}), so training would change nothing: make it of the model that is "
            "trained. With peft, call get_peft_model first, and pass its model to the trainer and to the optimizer"
        )
    warnings.warn(f"the optimizer does not have {len(left)} {of}, which are not trained: {shown}", stacklevel=3)
