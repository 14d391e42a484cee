"""The keys of param groups that a chain does not read: those of other packages, and mistakes."""

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.optim import Optimizer

from torchzero_clip.checks import HOW_TO_COMPUTE
from torchzero_clip.core.kinds import FinalRule, UpdateRule
from torchzero_clip.core.nodes import Nodes
from torchzero_clip.core.transform import Transform, as_text
from torchzero_clip.hints import did_you_mean, nearest

BEFORE_STEP = "before_step"
"""The key under which `before_step` keeps its transforms in the groups of an optimizer. Chains leave it out."""

HINTS = {
    "decoupled_weight_decay": ". If it is True, put WeightDecay(...) after the optimizer, otherwise before it. A Wrap "
    "takes it as an argument",
    "maximize": ". It is an argument of Modular",
    "weight_decay": ". Put WeightDecay(...) after Adam for that of torch.optim.AdamW, before it for that of "
    "torch.optim.Adam",
}


def why_refused(group: Mapping[str, object], nodes: Nodes, shown: Iterable[str] = ()) -> str | None:
    """The error for a param group with keys that the chain does not read; None if they can be stored.

    Keys of other packages and those in ``shown`` can be stored. Arguments of torch's optimizers and of transforms
    cannot if they have an effect, because the steps would ignore them.
    """
    stored = set(nodes.storage_keys.values())
    read = {*stored, *shown, *HOW_TO_COMPUTE, "params", "param_names", "name"}
    # as_lr lets schedulers store "max_norm:initial_lr"
    unread = {key: value for key, value in group.items() if key.partition(":")[0] not in read}
    torchs, unknown = torchs_arguments(group) if unread else set[str](), list[str]()
    # of all classes of transforms, also those of users
    arguments_of_transforms = set[str]().union(*_signatures(_derived(Transform))) if unread else set[str]()
    for key, value in unread.items():
        inner = [f"{node.path}/{key}" for node in nodes if f"{node.path}/{key}" in stored]
        owners = [node.transform for node in nodes if _structural(node.transform, key)]
        if inner and (has_effect(value) or key not in torchs):
            return f"no transform has a setting {key!r} under this bare name: write {inner[0]!r}"
        if owners and as_text(value) not in [_structural(owner, key) for owner in owners]:
            return (
                f"{key!r} of {owners[0]!r} cannot differ between param groups: it is part of the transform. "
                f"Use one {type(owners[0]).__name__} for each value"
            )
        if key == "decoupled_weight_decay":
            is_lost = bool(group.get("weight_decay")) and _decays_elsewhere(bool(value), nodes)
        elif key in torchs or key in arguments_of_transforms:
            is_lost = has_effect(value)
        else:
            # keys of other packages may resemble ours, so more likeness is needed than in errors
            is_lost = "/" in key or nearest(key, stored, likeness=0.85) is not None
        unknown += [key] if is_lost and not owners else []
    if not unknown:
        return None
    meant = did_you_mean(nodes.storage_keys.get(unknown[0], unknown[0]), sorted(stored))
    return f"no transform has a setting {' or '.join(map(repr, unknown))}{meant}{HINTS.get(unknown[0], '')}"


def has_effect(value: object) -> bool:
    """False for the values by which frameworks switch an argument off: None, False and 0."""
    return value is not None and not (isinstance(value, int | float) and value == 0)


def torchs_arguments(group: Iterable[str]) -> set[str]:
    """The keys of a param group that are arguments of optimizers of torch."""
    keys, signatures = set(group), _of_torch()
    # a key of only one optimizer counts if this optimizer has made the group: "rho" may be Adadelta's or SAM's
    makers = [arguments for arguments in signatures if arguments <= keys]
    largest = [arguments for arguments in makers if all(other <= arguments for other in makers)]
    common = {key for key in keys if sum(key in arguments for arguments in signatures) > 1}
    return common.union(*largest)


def keys_of_rules(group: Mapping[str, object], nodes: Nodes) -> dict[str, str]:
    """The keys that store the settings of the chain's optimizers, if an optimizer of torch has made the group."""
    is_built = any(arguments <= group.keys() for arguments in _of_torch())
    rules = [node for node in nodes if is_built and isinstance(node.transform, UpdateRule)]
    return {key: stored for node in reversed(rules) for key, stored in node.storage_keys.items()}


def _structural(transform: Transform, key: str) -> str | None:
    """The text of an argument that is not a setting; None if the transform does not have the argument."""
    parameter = inspect.signature(type(transform)).parameters.get(key)
    usual = None if parameter is None or key in transform.defaults else as_text(parameter.default)
    return transform.structure().get(key, usual)


def _decays_elsewhere(is_decoupled: bool, nodes: Nodes) -> bool:
    """True if the chain decays weights before its optimizer although the decay is decoupled, or after if it is not."""
    has_rule = False
    for transform in [node.transform for node in nodes]:
        has_rule = has_rule or isinstance(transform, UpdateRule)
        if "weight_decay" in transform.defaults:
            decouples, wrapped = has_rule, transform.template if isinstance(transform, FinalRule) else None
            if wrapped is not None:  # the optimizer in a Wrap decays weights by its own rule
                decouples = wrapped.defaults.get("decoupled_weight_decay", is_decoupled)
            return decouples is not is_decoupled
    return False


@functools.cache
def _of_torch() -> list[frozenset[str]]:
    return _signatures(vars(torch.optim).values())


def _signatures(values: Iterable[object]) -> list[frozenset[str]]:
    """The arguments of the transforms and optimizers among some values."""
    kinds = [kind for kind in values if isinstance(kind, type) and issubclass(kind, Transform | Optimizer)]
    return [frozenset(inspect.signature(kind).parameters) - {"params"} for kind in kinds if kind is not Optimizer]


def _derived(kind: type[Transform]) -> Iterator[type[Transform]]:
    """The classes that are derived from a class of transforms, also those of users, of which there is no list."""
    for each in kind.__subclasses__():
        yield each
        yield from _derived(each)
