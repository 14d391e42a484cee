"""Settings in param groups: where each is stored, which keys are accepted, and how overrides split a group."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from torchzero_clip.checks import plain
from torchzero_clip.core.nodes import Nodes

# what torch's schedulers, its optimizers and trainers keep beside the settings
HOST_KEYS = frozenset(
    {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
)


def normalized(group: Mapping[str, Any], nodes: Nodes) -> dict[str, Any]:
    """The group with every setting under the key that stores it."""
    result: dict[str, Any] = {}
    stored = set(nodes.storage_keys.values())
    for key, value in group.items():
        # "max_norm:initial_lr" is what as_lr lets schedulers keep
        target = key if key in HOST_KEYS or key.partition(":")[0] in stored else nodes.storage_keys.get(key)
        if target is None:
            raise ValueError(_unknown_key_message(key, nodes, stored))
        if target in result:
            raise ValueError(f"the setting {target!r} is given twice, also as {key!r}")
        result[target] = plain(value) if target in stored else value
    return result


def split_by_overrides(group: Mapping[str, Any], nodes: Nodes) -> Iterator[dict[str, Any]]:
    """Groups in which all parameters have the same overrides, in the order of their first parameters."""
    overrides = [
        (own["params"], {node.storage_keys[key]: value for key, value in own.items() if key != "params"})
        for node in nodes
        for own in node.transform.overrides
    ]
    params = group["params"]
    if not overrides or isinstance(params, set):  # torch refuses sets, and says why
        yield dict(group)
        return
    settings = {key: value for key, value in group.items() if key != "params"}
    buckets: dict[tuple[int, ...], list[Any]] = {}
    for item in [params] if isinstance(params, Tensor) else list(params):
        param = item[1] if isinstance(item, tuple) else item
        chosen = tuple(i for i, (params, _) in enumerate(overrides) if any(param is p for p in params))
        buckets.setdefault(chosen, []).append(item)
    if not buckets:
        yield {"params": [], **settings}
    for chosen, items in buckets.items():
        own = {key: value for i in chosen for key, value in overrides[i][1].items()}
        yield {"params": items, **settings, **own}


def described(groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]) -> str:
    """How many parameters there are, by group, with the settings that are not the chain's."""
    rows: list[str] = []
    for group in groups:
        params = group["params"]
        count = f"<{len(params)} tensors, {sum(p.numel() for p in params)} elements>"
        own = {k: group[k] for k in defaults if k in group and group[k] is not defaults[k]}
        own = {k: v for k, v in own.items() if v != defaults[k]}
        rows.append(f"{{'params': {count}, {repr(own)[1:]}" if own else count)
    return rows[0] if len(rows) == 1 else f"[{', '.join(rows)}]"


def _unknown_key_message(key: str, nodes: Nodes, stored: Iterable[str]) -> str:
    for node in nodes:
        transform = node.transform
        if f"{node.path}/{key}" in stored:
            return f"no transform has a setting {key!r} under this bare name: write {f'{node.path}/{key}'!r}"
        if key in inspect.signature(type(transform)).parameters:
            return (
                f"{key!r} of {transform!r} cannot differ between param groups: it is part of the transform. "
                f"Use one {type(transform).__name__} for each value"
            )
    hint = ". Put WeightDecay(...) after Adam for that of torch.optim.AdamW, before it for that of torch.optim.Adam"
    return (
        f"no transform has a setting {key!r}; settings of this chain: {', '.join(sorted(stored))}"
        f"{hint if key == 'weight_decay' else ''}"
    )
