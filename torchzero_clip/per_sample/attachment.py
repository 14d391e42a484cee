"""Installs captured forwards in a model, and removes them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from torchzero_clip.compat import is_distributed
from torchzero_clip.per_sample.captured_layer import CapturedForward, CapturedLayer, Recorder, Rule
from torchzero_clip.per_sample.hooks import Notice, Outside
from torchzero_clip.per_sample.rules.registry import GENERIC, WHOLE, refusal, rule_for, rules


class Attachment:
    """All changes to a model by which its layers are captured.

    Args:
        model: The model.
        recorder: Gets the contributions of the layers.
        began: Called with the arguments of every forward of the model.
        force_generic: Run every layer by the generic rule.
    """

    def __init__(
        self, model: nn.Module, recorder: Recorder, *, began: Callable[..., None], force_generic: bool = False
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._began = began
        self._force_generic = force_generic
        self._handles: list[RemovableHandle] = []
        self._layers: list[CapturedLayer] = []
        self._owners: Counter[int] = Counter()
        self._seen: list[tuple[object, bool]] = []
        self._rules: Mapping[type[nn.Module], Rule] = {}
        self.params: dict[str, nn.Parameter] = {}

    def attach(self) -> None:
        """Capture every layer with trainable parameters.

        Raises:
            ValueError: If per-sample gradients of this model would be wrong, or something else captures it.
        """
        params = trainable(self._model)
        _check_model(self._model, params)
        layers = list(_layers(self._model, self._recorder, force_generic=self._force_generic))
        self.detach()
        self.params, self._layers = params, layers
        self._seen, self._rules = _held(self._model), rules()
        self._owners = Counter(id(param) for layer in layers for param in layer.params.values())
        began: Any = Notice(self._began, only_with_gradients=True)
        self._handles = [self._model.register_forward_pre_hook(began, with_kwargs=True)]
        for name, param in params.items():
            self._handles.append(param.register_hook(Outside(name, self._recorder)))
        for layer in layers:
            layer.module.__dict__["forward"] = CapturedForward(layer)

    def detach(self) -> None:
        """Restore the model."""
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            own = layer.module.__dict__.get("forward")
            if isinstance(own, CapturedForward) and own.layer is layer:
                del layer.module.__dict__["forward"]
        self._handles, self._layers = [], []

    def refresh(self) -> bool:
        """Capture the model again, if layers were frozen, unfrozen or replaced since, or got a rule.

        Returns:
            True if the model itself is captured now and was not before, which is too late for the current forward.
        """
        if not self.is_outdated():
            return False
        before = self._captures_model()
        self.attach()
        return self._captures_model() and not before

    def _captures_model(self) -> bool:
        return any(layer.module is self._model for layer in self._layers)

    def is_outdated(self) -> bool:
        """True if the model has changed since it was captured."""
        seen = _held(self._model)
        lent = any(isinstance(x, Tensor) and not isinstance(x, nn.Parameter) for x, _ in seen)
        if lent:
            return False  # functional_call replaces the parameters by other tensors, for this forward only
        if len(seen) != len(self._seen) or self._rules != rules():
            return True
        return any(a is not b or p != q for (a, p), (b, q) in zip(seen, self._seen, strict=True))

    def is_shared(self, param: Tensor) -> bool:
        """True if several layers have the parameter."""
        return self._owners[id(param)] > 1

    def reset_counts(self) -> None:
        """Count the calls of layers from 0 again."""
        for layer in self._layers:
            layer.calls = 0


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of a module, by name."""
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def _held(model: nn.Module) -> list[tuple[object, bool]]:
    """The modules and parameters of a model, and which parameters are trainable, to detect changes.

    It runs in every forward, so it reads the dictionaries, which is faster than `named_parameters`.
    """
    held: list[tuple[object, bool]] = []
    for module in model.modules():
        held.append((module, False))
        held += [(param, param.requires_grad) for param in module._parameters.values() if param is not None]
    return held


def _layers(model: nn.Module, recorder: Recorder, *, force_generic: bool) -> Iterator[CapturedLayer]:
    """The layers to capture: those with a rule, and other modules with own parameters, submodules included."""
    seen: set[int] = set()
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in seen:
            continue
        seen.add(id(module))
        if (reason := refusal(module, batch_first=recorder.batch_first)) is not None:
            raise ValueError(f"{_described(name, module)} cannot be clipped per sample: {reason}")
        rule, params = rule_for(module), trainable(module)
        if rule is None or not params or id(module) in inside:
            continue
        if (reason := rule.refusal(module)) is not None:
            raise ValueError(f"{_described(name, module)} cannot be clipped per sample: {reason}")
        if _covers_submodules(rule):
            inside.update(id(child) for child in module.modules())
        if _replaced(module, recorder):
            raise ValueError(
                f"{_described(name, module)} has a forward of its own, set on the instance: "
                "another clipper is attached to it, which has to be detached first, or something replaced it"
            )
        yield CapturedLayer(
            recorder, name, module, GENERIC if force_generic and not isinstance(rule, WHOLE) else rule, params
        )


def _replaced(module: nn.Module, recorder: Recorder) -> bool:
    """True if the instance has another forward than its class. Copies of attached models have that of their class."""
    own = module.__dict__.get("forward")
    if isinstance(own, CapturedForward) and own.layer.recorder is recorder:
        return False
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _covers_submodules(rule: Rule) -> bool:
    return rule is GENERIC or isinstance(rule, WHOLE)


def _check_model(model: nn.Module, params: dict[str, nn.Parameter]) -> None:
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise ValueError(f"module must be the model itself, got a {type(model).__name__}: it averages over samples")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"module must not be scripted, got a {type(model).__name__}: attach to the model it was made of"
        )
    for name, param in params.items():
        if isinstance(param, UninitializedParameter):
            raise ValueError(f"module must have all its parameters, but {name!r} is lazy: run a forward first")
        if is_distributed(param):
            raise ValueError(f"module must hold plain tensors, but {name!r} is a DTensor: clip before fully_shard")
        if param.is_complex():
            raise ValueError(f"module must hold real parameters, but {name!r} is {param.dtype}")


def _described(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else type(module).__name__
