"""Converts param groups of torch's optimizers to those of chains, and back."""

from collections.abc import Sequence

from torch import Tensor, optim
from torch.optim import Optimizer

from torchzero_clip.checkpoints.identity import IDENTITY
from torchzero_clip.checks import HOW_TO_COMPUTE, as_builtin
from torchzero_clip.core.chain_state import COUNTERS
from torchzero_clip.core.group_keys import BEFORE_STEP, torchs_arguments
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.scope import NamedParam
from torchzero_clip.core.transform import Transform
from torchzero_clip.modular.modular import Modular
from torchzero_clip.optimizers.adam import Adam
from torchzero_clip.optimizers.muon import Muon
from torchzero_clip.optimizers.rmsprop import RMSprop
from torchzero_clip.optimizers.sgd import SGD
from torchzero_clip.optimizers.weight_decay import WeightDecay
from torchzero_clip.optimizers.wrap import Wrap, constructed
from torchzero_clip.types import Group

TORCHS: dict[type[Transform], type[Optimizer]] = {Adam: optim.Adam, SGD: optim.SGD, RMSprop: optim.RMSprop}
if hasattr(optim, "Muon"):  # not in torch 2.8
    TORCHS[Muon] = optim.Muon


def optimizer_of(optimizer: Modular, params: Sequence[NamedParam]) -> str:
    """The name of the one transform that stands for an optimizer of torch for these parameters."""
    kinds, named_transforms = (*TORCHS, Wrap), optimizer.transforms.items()
    rules = [(name, transform.scope) for name, transform in named_transforms if type(transform) in kinds]
    selections = {tuple(name for name, scope in rules if scope.has(named)) for named in params} or {()}
    if len(selections) > 1 or len(names := selections.pop()) != 1:
        raise ValueError(
            "torch.optim has one optimizer for all parameters of a group: the chain needs exactly one of "
            f"{', '.join(kind.__name__ for kind in kinds)} for them, got {optimizer.runner.chain!r}"
        )
    return names[0]


def _template(transform: Transform) -> Optimizer:
    """The optimizer of torch that a transform stands for."""
    return transform.template if isinstance(transform, Wrap) else constructed(TORCHS[type(transform)], {})


def settings_from(old: Group, optimizer: Modular, name: str, params: Sequence[NamedParam]) -> Group:
    """Convert a group of torch's optimizer to the keys of the chain."""
    transform = optimizer.transforms[name]
    template = _template(transform)
    usual = template.param_groups[0].keys()
    lacks = usual - old.keys() - HOW_TO_COMPUTE - {"maximize", "decoupled_weight_decay"}  # versions differ in these
    has = torchs_arguments(old) - usual - HOW_TO_COMPUTE - {"maximize"}
    if lacks or has:
        differ = [f"{verb} {', '.join(sorted(keys))}" for verb, keys in (("lacks", lacks), ("has", has)) if keys]
        raise ValueError(
            f"the chain ends with {transform!r}, and the checkpoint is not from torch.optim.{type(template).__name__}: "
            f"it {'; '.join(differ)}. At the end of the chain, Wrap(torch.optim.X) takes checkpoints of any optimizer X"
        )
    _check_same("maximize", old.get("maximize", False), optimizer, transform)
    result: Group = {}
    for key, value in old.items():
        if f"{name}/{key}" in optimizer.runner.nodes.storage_keys:
            result[optimizer.runner.nodes.storage_keys[f"{name}/{key}"]] = as_builtin(value)
        elif key in usual:
            _check_same(key, value, optimizer, transform)
        elif key != BEFORE_STEP:
            result[key] = value  # keys of schedulers and trainers
    return result | _decay_from(old, optimizer, name, params) | {"lr": old["lr"]}


def settings_to(group: Group, new: Group, optimizer: Modular, name: str, params: Sequence[NamedParam]) -> Group:
    """Convert a group of the chain to the keys of torch's optimizer."""
    transform = optimizer.transforms[name]
    _check_same("maximize", new.get("maximize", False), optimizer, transform)
    result: Group = {"weight_decay": _decay_to(group, new, optimizer, name, params)} if "weight_decay" in new else {}
    for key, value in new.items():
        if f"{name}/{key}" in optimizer.runner.nodes.storage_keys:
            result[key] = group[optimizer.runner.nodes.storage_keys[f"{name}/{key}"]]
        else:
            _check_same(key, value, optimizer, transform)
    shared = optimizer.runner.chain.nodes().init_global_state()
    ours = {*optimizer.runner.nodes.storage_keys.values(), *shared, *COUNTERS, IDENTITY, "param_names", "params"}
    others = {k: v for k, v in group.items() if k not in ours and ":" not in k}
    return others | result | {"lr": copied(group["lr"])}


def _check_same(key: str, theirs: object, optimizer: Modular, transform: Transform) -> None:
    """Raise if an argument of torch's optimizer has another value in the transform or in the chain."""
    usual = _template(transform).param_groups[0]
    if key == "maximize":
        ours, owner = optimizer.runner.maximize, "Modular"
    elif key in HOW_TO_COMPUTE or key in ("params", "lr", "weight_decay") or key not in usual:
        return
    elif isinstance(transform, Wrap):
        ours, owner = usual[key], repr(transform)
    elif key == "decoupled_weight_decay":
        return  # the place of WeightDecay says it
    else:
        ours, owner = getattr(transform, key), repr(transform)
    theirs, ours = ("original" if key == "adjust_lr_fn" and value is None else value for value in (theirs, ours))
    if as_builtin(theirs) != as_builtin(ours) and (theirs or ours):
        raise ValueError(f"torch's optimizer has {key}={theirs!r}, and {owner} {key}={ours!r}")


def _decays(optimizer: Modular, name: str, params: Sequence[NamedParam], group: Group) -> tuple[list[str], list[str]]:
    """The transforms that decay these weights: those at the place where torch's optimizer does, and the others."""
    transforms = optimizer.transforms
    acting = [n for n, t in transforms.items() if isinstance(t, WeightDecay) and any(map(t.scope.has, params))]
    names = list(transforms)
    if any(isinstance(transforms[n], LR) for n in names[: max(map(names.index, (*acting, name)))]):
        advice = f"put LR at the end of {optimizer.runner.chain!r}"
        raise ValueError(f"in torch's optimizers the learning rate comes last: {advice}")
    before, after = ([n for n in acting if (names.index(n) < names.index(name)) == early] for early in (True, False))
    decoupled = group.get("decoupled_weight_decay")
    if isinstance(transforms[name], Wrap):
        return [], acting
    if not isinstance(transforms[name], Adam):
        decoupled = isinstance(transforms[name], Muon)
    elif decoupled is None:  # checkpoints of older versions do not say which of the two it is
        decoupled = not before
    return (after, before) if decoupled else (before, after)


def _decay_from(old: Group, optimizer: Modular, name: str, params: Sequence[NamedParam]) -> Group:
    """The decays of the group: that of the checkpoint where torch's optimizer decays, and 0 elsewhere."""
    there, elsewhere = _decays(optimizer, name, params, old)
    value = 0.0 if isinstance(optimizer.transforms[name], Wrap) else old.get("weight_decay", 0.0)
    for_all = [n for n in there if all(map(optimizer.transforms[n].scope.has, params))]
    if value and not for_all:
        side = "after" if old.get("decoupled_weight_decay") or type(optimizer.transforms[name]) is Muon else "before"
        scoped = ", for all parameters of this group" if there else ""
        raise ValueError(f"the checkpoint has weight_decay={value}: put WeightDecay({value}) {side} {name!r}{scoped}")
    values = dict.fromkeys((*there, *elsewhere), 0.0) | ({for_all[0]: value} if value else {})
    return {optimizer.runner.nodes.storage_keys[f"{n}/weight_decay"]: decay for n, decay in values.items()}


def _decay_to(group: Group, new: Group, optimizer: Modular, name: str, params: Sequence[NamedParam]) -> float:
    there, elsewhere = _decays(optimizer, name, params, new)
    values = {n: group[optimizer.runner.nodes.storage_keys[f"{n}/weight_decay"]] for n in (*there, *elsewhere)}
    used = [n for n, value in values.items() if value]
    if not used:
        return 0.0
    partial = not all(map(optimizer.transforms[used[0]].scope.has, params))
    if len(used) > 1 or used[0] in elsewhere or partial:
        raise ValueError(
            f"torch's optimizer cannot decay weights as this chain does: {optimizer.runner.chain!r}. In torch all "
            "parameters of a group have the same decay: WeightDecay before the optimizer is torch.optim.Adam's, after "
            "it torch.optim.AdamW's"
        )
    return values[used[0]]


def copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value
