"""Settings in param groups: where each is stored, which keys are accepted, and how overrides split a group."""

import inspect
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from torchzero_clip.checks import as_builtin
from torchzero_clip.core.group_keys import BEFORE_STEP, keys_of_rules, torchs_arguments, why_refused
from torchzero_clip.core.learning_rate import rates_of
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.schedules import Schedules
from torchzero_clip.core.scope import NamedParam
from torchzero_clip.types import Group, Setting


def as_groups(params: ParamsT | nn.Module, *, may_be_empty: bool) -> Any:
    """The argument ``params`` as torch takes it. If it may be empty, it becomes one empty group."""
    listed: Any = list(params.named_parameters()) if isinstance(params, nn.Module) else params
    if inspect.isgenerator(listed):
        listed = list(listed)
        if not listed:
            raise ValueError(
                "optimizer got an empty parameter list: a generator gives its parameters only once. Pass "
                "list(model.parameters()), or the model itself"
            )
    if not may_be_empty or isinstance(listed, Tensor):
        return listed
    return list(listed) or [{"params": []}]


def accepted(
    group: Mapping[str, object],
    nodes: Nodes,
    groups: Sequence[Group],
    *,
    module: nn.Module | None,
    ignored: Container[str],
    is_complete: bool,
) -> Group:
    """A group that is added, with every setting under the key that stores it, and names if the others have them."""
    others = groups if is_complete else []  # while an optimizer is made, torch compares its groups
    kept = {key: value for key, value in group.items() if key != BEFORE_STEP and key not in ignored}
    named = _with_names_of_module(kept, others, module)
    added = _normalized(named, nodes)
    _check_new(added, others)
    _let_names_decide(groups, added)
    return added


def _normalized(group: Mapping[str, object], nodes: Nodes) -> Group:
    """The group with every setting under the key that stores it."""
    if message := why_refused(group, nodes, nodes.storage_keys):
        raise ValueError(message)
    result: Group = {}
    stored = set(nodes.storage_keys.values())
    # in a group of torch's optimizer, "eps" is not that of a clip which comes first in the chain
    keys = {**nodes.storage_keys, **keys_of_rules(group, nodes)}
    without_effect = torchs_arguments(group) - stored
    for key, value in group.items():
        if key in without_effect:
            continue
        target = keys.get(key, key)
        if target in result:
            raise ValueError(f"the setting {target!r} is given twice, also as {key!r}")
        result[target] = as_builtin(value) if target in stored else value
    params = result.get("params")
    if params is not None and not isinstance(params, set):  # torch raises for sets, and its message says why
        params = result["params"] = [params] if isinstance(params, Tensor) else list(params)
    if params is not None and (names := result.get("param_names")) is not None:  # as in groups of an optimizer
        if len(names) != len(params):
            raise ValueError(f"'param_names' has {len(names)} names for {len(params)} parameters")
        if params and not any(isinstance(item, tuple) for item in params):
            result["params"] = list(zip(names, params, strict=True))
            del result["param_names"]
    return result


def _let_names_decide(groups: Sequence[Group], added: Group) -> None:
    """If no group has a parameter yet, give them names if the added group has names: torch allows no mix."""
    params = added.get("params")
    if not params or isinstance(params, set) or any(group["params"] for group in groups):
        return
    for group in groups:
        group.pop("param_names", None)
        if isinstance(params[0], tuple):
            group["param_names"] = []


def _with_names_of_module(group: Group, others: Sequence[Group], module: nn.Module | None) -> Group:
    """The group with the names of its parameters, if the other groups have names: torch allows no mix."""
    params: Any = group.get("params")
    params = [params] if isinstance(params, Tensor) else params
    if not any("param_names" in other for other in others) or isinstance(params, set | Mapping | None):
        return group
    params = list(params)
    if not params or any(isinstance(param, tuple) for param in params):
        return {**group, "params": params}
    names = {} if module is None else {id(param): name for name, param in module.named_parameters()}
    if missing := [i for i, param in enumerate(params) if id(param) not in names]:
        raise ValueError(
            f"the optimizer knows its parameters by name, and the added group has one without a name, at index "
            f"{missing[0]}: pass pairs of a name and a parameter, as named_parameters() of the module yields them"
        )
    return {**group, "params": [(names[id(param)], param) for param in params]}


def _check_new(group: Mapping[str, object], others: Sequence[Group]) -> None:
    """Raise if a parameter of an added group is in another group."""
    params: Any = group.get("params")
    params = [] if isinstance(params, set | None) else params  # torch raises for these
    held = {id(param) for other in others for param in other["params"]}
    if count := sum(id(item[1] if isinstance(item, tuple) else item) in held for item in params):
        raise ValueError(
            f"{count} of the added parameters appear in more than one parameter group, because the optimizer has them "
            "already. To unfreeze a parameter, set its requires_grad: it takes part as soon as it has a gradient"
        )


def split(group: Group, nodes: Nodes) -> Iterator[Group]:
    """Groups in which all parameters have the same overrides and learning rate, in the order of first parameters."""
    pairs = [(override, node.storage_keys) for node in nodes for override in node.transform.overrides]
    overrides = [(o["params"], {keys[k]: v for k, v in o.items() if k != "params"}) for o, keys in pairs]
    rates = [] if "lr" in group else rates_of(nodes)
    params = group["params"]
    if not (overrides or rates) or isinstance(params, set):
        yield dict(group)
        return
    settings = {key: value for key, value in group.items() if key != "params"}
    buckets: dict[tuple[tuple[int, ...], int | None], list[Any]] = {}
    for item in params:
        name, param = item if isinstance(item, tuple) else (None, item)
        chosen = tuple(i for i, (params, _) in enumerate(overrides) if any(param is p for p in params))
        rate = _rate(NamedParam(param, name, group.get("name")), rates)
        buckets.setdefault((chosen, rate), []).append(item)
    if not buckets:
        yield {"params": [], **settings}
    for part, ((chosen, rate), items) in enumerate(buckets.items(), 1):
        replaced = {key: value for i in chosen for key, value in overrides[i][1].items()}
        if rate is not None:
            lr = rates[rate][1]
            replaced["lr"] = 1.0 if lr is None else lr  # as `with_learning_rate` does for a rule without one
        if "name" in settings and part > 1:
            replaced["name"] = f"{settings['name']} ({part})"
        yield {"params": items, **(settings if part == 1 else with_own_tensors(settings)), **with_own_tensors(replaced)}


def with_own_tensors(settings: Setting) -> dict[str, Any]:
    """Settings with copies of tensors, so that a scheduler that fills one changes no other group or optimizer."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in settings.items()}


def check_disjoint(groups: Sequence[Group]) -> None:
    """Raise, as torch does, if a parameter is in two groups."""
    if len(set().union(*(group["params"] for group in groups))) < sum(len(set(group["params"])) for group in groups):
        raise ValueError("some parameters appear in more than one parameter group")


@contextmanager
def all_or_none(groups: list[Group], schedules: Schedules) -> Generator[None]:
    """Remove the groups that were added if there is an error."""
    before, schedules_before = len(groups), len(schedules.of_groups)
    try:
        yield
    except Exception:
        del groups[before:]
        del schedules.of_groups[schedules_before:]
        raise


def _rate(named: NamedParam, rates: Sequence[tuple[Node, object]]) -> int | None:
    """The index of the learning rate of a parameter; raises if the rules that act on it have different ones."""
    acting = [i for i, (node, _) in enumerate(rates) if node.scope.has(named)]
    acting = [i for i in acting if rates[i][1] is not None] or acting
    for i in acting[1:]:
        if rates[i][1] is not rates[acting[0]][1] and rates[i][1] != rates[acting[0]][1]:
            rules = ", ".join(repr(rates[k][0].transform) for k in acting)
            raise ValueError(
                f"{named} has several learning rates, those of {rules}: limit them by only and without, name one rate, "
                "or give its param group an lr"
            )
    return acting[0] if acting else None
