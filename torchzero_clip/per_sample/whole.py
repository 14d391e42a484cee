"""Which modules are run whole: sample by sample, with all that is in them."""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

Whole: TypeAlias = Sequence[type[nn.Module] | str]

TESTED = "transformers 5.23"
"""The version of transformers with which the table below was tested."""

_IN = "transformers.models."
TABLE: Mapping[str, str] = {
    "peft.tuners.loha.layer.LoHaLayer": "it uses its parameters in a torch.autograd.Function",
    f"{_IN}swin.modeling_swin.SwinLayer": "it joins the samples and the windows in one dimension",
    f"{_IN}deberta.modeling_deberta.DebertaEncoder": "it uses the weight of an embedding outside of its call",
    f"{_IN}deberta_v2.modeling_deberta_v2.DebertaV2Encoder": "it uses the weight of an embedding outside of its call",
}
"""Classes that cannot be captured layer by layer, by their qualified names, and the reason."""

_AROUND: Mapping[str, str] = {
    "peft.tuners.lora.dora.DoraLinearLayer": "DoRA uses the weights of two layers outside of their calls"
}
"""Classes that need the module around them to be run whole, by their qualified names, and the reason."""


def chosen_whole(model: nn.Module, given: Any) -> dict[str, str]:
    """The names of the modules that are run whole, with the reason.

    The outermost of nested modules counts, and what the user gives counts more than the table.
    """
    if isinstance(given, str | type):
        raise TypeError(f"whole must be a sequence of classes and patterns, got {given!r}: put it into a list")
    for item in given:
        if not (isinstance(item, str) or (isinstance(item, type) and issubclass(item, nn.Module))):
            raise TypeError(f"whole must hold classes of modules and patterns for names, got {item!r}")
        if not any(_is_meant(name, module, item) for name, module in model.named_modules()):
            what = f"pattern {item!r}" if isinstance(item, str) else f"class {item.__name__}"
            raise ValueError(f"whole has the {what}, which names no module of {type(model).__name__}")
    chosen: dict[str, str] = {}
    for name, module in model.named_modules():
        if any(_is_meant(name, module, item) for item in given) and not _inside(name, chosen):
            chosen[name] = "whole="
    found = {name: reason for name, module in model.named_modules() if (reason := _listed(module, TABLE))}
    for name, module in model.named_modules():
        if (reason := _listed(module, _AROUND)) and (outer := _around(model, name)):
            found[outer[0][0]] = reason
    by_user = [*chosen]
    for name, reason in sorted(found.items()):  # the outer ones first, whose names are the beginning of the others
        if not any(_inside(other, [name]) for other in by_user) and not _inside(name, chosen):
            chosen[name] = reason
    return chosen


def whole_hint(model: nn.Module, name: str, reruns: Collection[str]) -> str:
    """A way out: the argument ``whole`` with a module around the named one, the nearest first. Empty without one.

    ``reruns`` names modules that run again in the backward, so that no module around them can be run whole.
    """
    around = [module for outer, module in _around(model, name) if not any(_inside(other, [outer]) for other in reruns)]
    kinds = dict.fromkeys(map(type, around))
    # a line with Sequential would take all of them
    lines = [f"whole=({class_in_code(model, kind)},)" for kind in kinds if kind is not nn.Sequential][:3]
    if not lines:
        return ""
    which = "the module around it, or one further out," if len(lines) > 1 else "the module around it"
    return f"run {which} sample by sample: {', or '.join(lines)}"


def class_in_code(model: nn.Module, kind: type[nn.Module]) -> str:
    """The name of a class in a line to write, with its Python module if another class in the model has that name."""
    others = {type(module) for module in model.modules()} - {kind}
    return _qualified(kind) if any(other.__name__ == kind.__name__ for other in others) else kind.__name__


def _listed(module: nn.Module, table: Mapping[str, str]) -> str | None:
    return next((table[key] for kind in type(module).__mro__ if (key := _qualified(kind)) in table), None)


def _around(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules around a module that have a forward, the nearest first."""
    modules, path = dict(model.named_modules()), name.split(".") if name else []
    names = [".".join(path[:i]) for i in range(len(path) - 1, -1, -1)]
    around = [(outer, modules[outer]) for outer in names if outer in modules]
    return [(outer, module) for outer, module in around if type(module).forward is not nn.Module.forward]


def _is_meant(name: str, module: nn.Module, item: type[nn.Module] | str) -> bool:
    return fnmatchcase(name, item) if isinstance(item, str) else isinstance(module, item)


def _inside(name: str, others: Mapping[str, str] | Sequence[str]) -> bool:
    """True if a module is one of the others, or in one of them."""
    return any(name == other or not other or name.startswith(f"{other}.") for other in others)


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
