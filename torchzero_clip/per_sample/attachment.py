"""Installs forwards and hooks in a model whose layers are captured, and removes them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from torchzero_clip.compat import current_graph_task_id, fully_sharded, is_distributed
from torchzero_clip.per_sample.capture import Capture
from torchzero_clip.per_sample.captured_layer import CapturedLayer
from torchzero_clip.per_sample.hooks import Hook
from torchzero_clip.per_sample.layer import layer_text, trainable
from torchzero_clip.per_sample.processes.agreement import Processes
from torchzero_clip.per_sample.processes.sharding import group_of_shards, reshard, slots, stands_for
from torchzero_clip.per_sample.rules.copies import EMPTY
from torchzero_clip.per_sample.rules.generic import GENERIC
from torchzero_clip.per_sample.rules.registry import (
    BARE,
    RULES,
    BatchNorm,
    mixes,
    own_params,
    refusal,
    rule_for,
)
from torchzero_clip.per_sample.whole import Whole, chosen_whole


class Attachment:
    """The captured layers of a model: see `Engine`. Raises a ValueError if per-sample gradients would be wrong."""

    def __init__(
        self, capture: Capture, whole: Whole, refuse_outside: Callable[[str, Tensor], None], *, force_generic: bool
    ) -> None:
        self._capture, self._given_whole, self._force_generic = capture, whole, force_generic
        self._refuse_outside = refuse_outside
        # each with its module, because in a copy of the module its forward is an ordinary function
        self._captured: list[tuple[nn.Module, CapturedLayer]] = []
        self._unhooked: list[tuple[str, dict[str, Any], str]] = []  # parameters that are not shown in full, as `slots`
        self._model_handles: list[RemovableHandle] = []
        self._attach()
        if capture.processes.sharded:  # before the hook of fully_shard
            self.before_forward(self._follow_shards, prepend=True)

    def before_forward(self, function: Callable[..., None], **options: bool) -> None:
        """Call a function before each forward of the model, until it is restored."""
        self._model_handles.append(self._capture.model.register_forward_pre_hook(Hook(function), **options))

    def after_forward(self, function: Callable[..., None]) -> None:
        """Call a function after each forward of the model, also if it raises, until it is restored."""
        self._model_handles.append(self._capture.model.register_forward_hook(Hook(function), always_call=True))

    def refresh(self) -> None:
        """Capture the model again if it has changed since, and refuse a BatchNorm in training mode."""
        if self.is_outdated():
            if self._capture.processes.sharded:
                raise RuntimeError("the module has changed: call the whole of it, so that its shards are found")
            self._attach()
        for name, module in self._batch_norms:
            _refuse(name, module, mixes(module))

    def is_outdated(self) -> bool:
        """True if the model has changed since it was captured, or a rule was registered."""
        held = _held(self._capture.model)
        if len(held) == len(self._held) and self._rules == RULES:
            pairs = zip(held, self._held, strict=True)
            if all(p == q and (a is b or stands_for(a, b)) for (a, p), (b, q) in pairs):
                return False
        # functional_call replaces the parameters by other tensors, for this forward only
        is_lent = any(isinstance(x, Tensor) and not isinstance(x, nn.Parameter) for x, _ in held)
        return not is_lent

    @property
    def layers(self) -> list[CapturedLayer]:
        """The captured layers."""
        return [layer for _, layer in self._captured]

    def detach(self) -> None:
        """Restore the model."""
        self._remove()
        for handle in self._model_handles:
            handle.remove()

    def _attach(self) -> None:
        capture, model = self._capture, self._capture.model
        reshard(model)
        _check_model(model, capture.processes)
        whole = chosen_whole(model, self._given_whole)
        layers = list(self._found_layers(whole))  # if it raises, the model stays captured as before
        self._remove()
        self.whole = whole
        """The modules that are run whole, by name, with the reason."""
        self._captured = [(layer.module, layer) for layer in layers]
        self.captures_model = any(layer.module is model for layer in layers)
        self._held, self._rules = _held(model), dict(RULES)
        capture.params, capture.modules = trainable(model), list(model.modules())
        self._batch_norms = [(name, module) for name, module in model.named_modules() if isinstance(module, BatchNorm)]
        capture.owners = Counter(id(param) for layer in layers for param in layer.params.values())
        capture.handles += [
            p.register_hook(Hook(partial(self._refuse_outside, name))) for name, p in capture.params.items()
        ]
        for module, forward in self._captured:
            module.__dict__["forward"] = forward  # no other way keeps the class, the names and the hooks of the module
        # what `fully_shard` shows in place of the parameters exists from the first forward on
        self._unhooked = list(slots(model, capture.params))
        for module in fully_sharded(model):
            capture.handles.append(module.register_forward_pre_hook(Hook(self._hook_unsharded)))

    def _follow_shards(self, *args: object) -> None:
        if current_graph_task_id() == -1 and self.is_outdated():
            self._attach()

    def _hook_unsharded(self, *args: object) -> None:
        """Hook the parameters that are shown in full now."""
        for name, params, key in self._unhooked:
            value = params.get(key)
            if value is not None and not is_distributed(value):
                self._capture.handles.append(value.register_hook(Hook(partial(self._refuse_outside, name))))
        self._unhooked = [item for item in self._unhooked if is_distributed(item[1].get(item[2]))]

    def _remove(self) -> None:
        for handle in self._capture.handles:
            handle.remove()
        for module, forward in self._captured:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
        self._captured = []
        self._capture.handles.clear()

    def _found_layers(self, whole: Mapping[str, str]) -> Iterator[CapturedLayer]:
        """The layers to capture: those with a rule, and other modules with parameters of their own."""
        inside: set[int] = set()
        for name, module in self._capture.model.named_modules():
            # of all modules, because those without parameters mix samples too
            _refuse(name, module, refusal(module, batch_first=self._capture.batch_first) or mixes(module))
            params = trainable(module)
            rule = GENERIC if params and name in whole else rule_for(module)
            if id(module) in inside or rule is None or not params:
                continue
            _refuse(name, module, rule.refusal(module))
            # rules of modules with submodules stay: that of attention knows where its batch dimension is
            if self._force_generic and not rule.covers_submodules:
                rule = GENERIC
            if rule.covers_submodules:
                inside.update(id(child) for child in module.modules())
            elif rule is BARE:
                own = own_params(module)
                params = {key: param for key, param in params.items() if id(param) in own}
            layer = CapturedLayer(self._capture, name, module, rule, params, EMPTY)
            if _is_replaced(layer):
                if isinstance(vars(module)["forward"], CapturedLayer):
                    raise ValueError(
                        "another clipper is attached to the module: call detach() of that clipper first, or use it "
                        "as 'with PerSampleGradientClipper(...) as clipper:'"
                    )
                raise ValueError(f"{layer} has a forward of its own, set on the instance, which cannot be captured")
            yield layer


def _check_model(model: nn.Module, processes: Processes) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DataParallel | DistributedDataParallel):
            who, kind = repr(name) if name else "module", type(module).__name__
            raise ValueError(f"{who} is a {kind}: wrap the whole model in DistributedDataParallel, or nothing of it")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"module must not be scripted, got a {type(model).__name__}: attach to the model it was made of"
        )
    params = trainable(model)
    if params and fully_sharded(model) and not processes.sharded:  # during a forward, they may be shown in full
        raise ValueError("module was sharded later: make the clipper after fully_shard")
    if group_of_shards(model, params) is not (processes.group if processes.sharded else None):
        raise ValueError("the parameters of module were distributed after the clipper was made: make a new clipper")
    for name, param in params.items():
        if isinstance(param, UninitializedParameter):
            raise ValueError(f"module must have all its parameters, but {name!r} is lazy: run a forward first")
        if param.is_complex():
            raise ValueError(f"module must hold real parameters, but {name!r} is {param.dtype}")


def _refuse(name: str, module: nn.Module, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"{layer_text(name, module)} cannot be clipped per sample: {reason}")


def _is_replaced(layer: CapturedLayer) -> bool:
    """True if the instance has another forward than its class. Copies of models have that of their class."""
    own = layer.module.__dict__.get("forward")
    if isinstance(own, CapturedLayer) and own.capture is layer.capture:
        return False
    return own is not None and getattr(own, "__func__", None) is not type(layer.module).forward


def _held(model: nn.Module) -> list[tuple[object, bool]]:
    """The modules and parameters of a model, and which parameters are trainable, to detect changes."""
    # in every forward, so it reads the dictionaries, which is faster than `named_parameters`
    held: list[tuple[object, bool]] = []
    for module in model.modules():
        held.append((module, False))
        held += [(param, param.requires_grad) for param in module._parameters.values() if param is not None]
    return held
