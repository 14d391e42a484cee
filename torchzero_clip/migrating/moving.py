"""Converts checkpoints of torch's optimizers and of other chains for a chain, and of a chain for torch's."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from torchzero_clip.checkpoints.adapt import adapted, fresh_state
from torchzero_clip.checkpoints.fitting import saved_groups
from torchzero_clip.checkpoints.identity import IDENTITY
from torchzero_clip.checks import instance
from torchzero_clip.core.chain_state import COUNTERS
from torchzero_clip.core.kinds import FinalRule
from torchzero_clip.core.nodes import Nodes
from torchzero_clip.core.scope import NamedParam, named_params
from torchzero_clip.core.transform import Transform
from torchzero_clip.migrating.torch_groups import TORCHS, copied, optimizer_of, settings_from, settings_to
from torchzero_clip.modular.modular import Modular
from torchzero_clip.optimizers.wrap import Wrap
from torchzero_clip.types import Checkpoint, Group, NewState, State, StateDict


def from_torch_optim(state_dict: Checkpoint, optimizer: Modular) -> StateDict:
    """Return a checkpoint with which a chain continues where an optimizer of `torch.optim` stopped.

    The chain needs the same optimizer at its end, for the same parameters in the same groups: `Adam` and a
    `WeightDecay` after it for `torch.optim.AdamW`, or before it for the ``weight_decay`` of `torch.optim.Adam`; `SGD`,
    `RMSprop` and `Muon` for their namesakes; `Wrap` for all others. Moments, step counts, learning rates, settings and
    the values that schedulers store in the groups come from the checkpoint. All other state is fresh. The checkpoint of
    a chain is returned unchanged, so a trainer may call this from a hook that
    ``optimizer.register_load_state_dict_pre_hook`` registers.

    Args:
        state_dict: The ``state_dict()`` of the old optimizer. It is not changed, and shares tensors with the result.
        optimizer: The chain that will load the result; it is not changed.

    Returns:
        What ``optimizer.load_state_dict`` takes.

    Raises:
        ValueError: If the groups have other sizes, if a parameter has no optimizer in the chain or several, if state or
            settings belong to another optimizer, or if the checkpoint decays weights and the chain does not.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular, WeightDecay, from_torch_optim
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> adamw = torch.optim.AdamW([weight], lr=0.1)
        >>> weight.grad = torch.tensor([1.0, -2.0])
        >>> adamw.step()
        >>> optimizer = Modular([weight], ClipNorm(10.0), Adam(), WeightDecay(0.0), LR(1.0))
        >>> optimizer.load_state_dict(from_torch_optim(adamw.state_dict(), optimizer))
        >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]
        (0.1, 0.01)
    """
    instance("optimizer", optimizer, Modular, "write from_torch_optim(state_dict, optimizer)")
    instance("state_dict", state_dict, Mapping)
    saved = saved_groups(state_dict, optimizer.param_groups)
    if saved and all(IDENTITY in group for group in saved):
        return dict(state_dict)
    groups = [dict(group) for group in optimizer.state_dict()["param_groups"]]
    nodes = optimizer.runner.chain.nodes()
    for group in groups:
        group |= nodes.init_global_state() | {key: 0 for key in COUNTERS if key in group}
    state: dict[int | str, NewState] = {}
    for old, new, group in zip(saved, groups, optimizer.param_groups, strict=True):
        params = named_params(group)
        new["params"] = old["params"]
        if not params:
            continue
        name = optimizer_of(optimizer, params)
        new.update(settings_from(old, optimizer, name, params))
        others = [node for node in nodes if node.path != name]
        for i, named in zip(old["params"], params, strict=True):
            if i in state_dict["state"]:
                moved = _state_from(state_dict["state"][i], nodes, name, named, new)
                state[i] = fresh_state(others, named, new) | moved
    return {"state": state, "param_groups": groups}


def adapt_state_dict(
    optimizer: Modular,
    state_dict: Checkpoint,
    *,
    new: str | Iterable[str] = (),
    dropped: str | Iterable[str] = (),
) -> StateDict:
    """Return a checkpoint of another chain, converted for the chain of this optimizer.

    It serves trainers that call ``load_state_dict`` themselves: with ``new`` and ``dropped`` bound it is a hook for
    ``optimizer.register_load_state_dict_pre_hook``. A checkpoint of this very chain does not change, so the hook may
    stay. Copies of the optimizer (deepcopy, pickle) do not have the hook.

    Args:
        optimizer: The optimizer that will load the result; it is not changed.
        state_dict: The checkpoint; it is not changed, and shares tensors with the result.
        new: As in `Modular.load_state_dict`.
        dropped: As in `Modular.load_state_dict`.

    Returns:
        What ``optimizer.load_state_dict`` takes.

    Raises:
        ValueError: If the remaining transforms do not match in order, by kind and structure.
        TypeError: If ``optimizer`` is not a `Modular`.

    Examples:
        >>> import torch
        >>> from functools import partial
        >>> from torchzero_clip import SGD, ClipNorm, Modular, adapt_state_dict
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> saved = Modular([weight], SGD(0.5)).state_dict()
        >>> optimizer = Modular([weight], ClipNorm(1.0), SGD(0.1))
        >>> hook = partial(adapt_state_dict, new=["clip_norm"])
        >>> handle = optimizer.register_load_state_dict_pre_hook(hook)
        >>> optimizer.load_state_dict(saved)
        >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["max_norm"]
        (0.5, 1.0)
    """
    instance("optimizer", optimizer, Modular, "before_step has arguments new and dropped of its own")
    return adapted(state_dict, optimizer.param_groups, optimizer.runner.nodes, new, dropped)


def to_torch_optim(optimizer: Modular, target: Optimizer) -> StateDict:
    """Return a checkpoint with which an optimizer of `torch.optim` continues where a chain stopped.

    The other transforms of the chain, such as clipping, and their state are left out.

    Args:
        optimizer: The chain, with one optimizer for all its parameters.
        target: The optimizer that will load the result, with the same parameters in the same groups; it is not
            changed.

    Returns:
        What ``target.load_state_dict`` takes; it shares no memory with the chain.

    Raises:
        ValueError: If the groups have other sizes, if the optimizer of the chain is not of the kind of ``target``, or
            if weights decay in another way.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import AdamW, ClipNorm, Modular, to_torch_optim
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = Modular([weight], ClipNorm(1.0), AdamW(lr=0.1))
        >>> weight.grad = torch.tensor([1.0, -2.0])
        >>> optimizer.step()
        >>> adamw = torch.optim.AdamW([weight])
        >>> adamw.load_state_dict(to_torch_optim(optimizer, adamw))
        >>> adamw.state[weight]["step"], adamw.param_groups[0]["lr"]
        (tensor(1.), 0.1)
    """
    instance("optimizer", optimizer, Modular)
    instance("target", target, Optimizer)
    saved = saved_groups(optimizer.state_dict(), target.param_groups)
    groups: list[Group] = []
    state: dict[int | str, NewState] = {}
    kept = target.state_dict()["param_groups"]
    for old, new, group in zip(saved, kept, optimizer.param_groups, strict=True):
        params = named_params(group)
        if not params:
            groups.append(new)
            continue
        name = optimizer_of(optimizer, params)
        _check_target(optimizer.transforms[name], target)
        groups.append({**new, **settings_to(group, new, optimizer, name, params), "params": old["params"]})
        for i, named in zip(old["params"], params, strict=True):
            of_param: State = optimizer.state.get(named.param, {})  # pyright: ignore
            moved = {k.removeprefix(f"{name}/"): v for k, v in of_param.items() if k.startswith(f"{name}/")}
            if moved:
                _check_dtypes(moved, named)
                # RMSprop counts steps, and does not use the count
                state[i] = {"step": _counted(0)} if isinstance(target, optim.RMSprop) else {}
                state[i].update({key: copied(value) for key, value in moved.items()})
    return {"state": state, "param_groups": groups}


def _check_target(transform: Transform, target: Optimizer) -> None:
    wrapped = isinstance(transform, Wrap)
    expected = transform.optimizer_class if wrapped else TORCHS[type(transform)]
    if not (type(target) is expected if wrapped else isinstance(target, expected)):
        raise ValueError(f"{transform!r} stands for torch.optim.{expected.__name__}, not {type(target).__name__}")


def _check_dtypes(state: State, named: NamedParam) -> None:
    for key, value in state.items():
        if key != "step" and isinstance(value, Tensor) and value.ndim and value.dtype != named.param.dtype:
            raise ValueError(
                f"the state {key!r} of a parameter of {named.param.dtype} is {value.dtype}: optimizers of torch would "
                "round it"
            )


def _state_from(saved: State, nodes: Nodes, name: str, named: NamedParam, group: Group) -> NewState:
    """The state of one parameter, with the chain's keys."""
    node = nodes.by_path[name]
    transform, setting = node.transform, node.settings(group)
    possible = node.possible_state(named, setting)
    result: NewState = {}
    for key, value in saved.items():
        if f"{name}/{key}" in possible:
            if value is not None:  # torch stores None for a momentum that was not used yet
                result[f"{name}/{key}"] = _counted(value) if key == "step" else value
        elif key != "step":  # RMSprop counts steps, and does not use the count
            raise ValueError(f"the checkpoint has the state {key!r}, which {transform!r} does not: load it with Wrap")
    needed = [] if isinstance(transform, FinalRule) else list(node.init_state(named, setting))
    if missing := [key for key in needed if key not in result]:
        keys = ", ".join(repr(key.removeprefix(f"{name}/")) for key in missing)
        raise ValueError(f"the checkpoint lacks the state {keys} of a parameter, which {transform!r} has")
    return result


def _counted(step: float | Tensor) -> Tensor:
    """The step count as a tensor. Older versions of torch store a number."""
    return step.float() if isinstance(step, Tensor) else torch.tensor(float(step), dtype=torch.float32, device="cpu")
