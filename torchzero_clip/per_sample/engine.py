"""Captures the layers of a model: installs forwards and hooks in it, and removes them."""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from torchzero_clip.checks import boolean, instance, one_of
from torchzero_clip.compat import is_distributed
from torchzero_clip.per_sample.captured_layer import CapturedForward, CapturedLayer, Rule
from torchzero_clip.per_sample.contributions import Memory
from torchzero_clip.per_sample.hooks import Notice, Outside
from torchzero_clip.per_sample.mixing import Verify
from torchzero_clip.per_sample.param_attributes import ParamAttributes
from torchzero_clip.per_sample.recording import Forward, Phase, Recording, in_backward
from torchzero_clip.per_sample.rules.registry import BARE, RULES, WHOLE, may_mix, mixes, own_params, refusal, rule_for
from torchzero_clip.per_sample.rules.whole import Whole, chosen_whole


class Engine(Recording):
    """Captures the layers of a model, and collects their per-sample gradients.

    Args:
        model: The model.
        batch_first: Whether samples are in the first dimension of sequences.
        memory: With "low", layers with a cheaper form store no per-sample gradients.
        force_generic: Run every layer by the generic rule.
        whole: Modules that the generic rule runs with all in them: classes, or patterns for names.
        verify: When to check that samples do not mix.
        shown: What users read as attributes of parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_first: bool = True,
        memory: Memory = "auto",
        force_generic: bool = False,
        whole: Whole = (),
        verify: Verify = "first",
        shown: ParamAttributes | None = None,
    ) -> None:
        instance("module", model, nn.Module)
        boolean("batch_first", batch_first)
        one_of("memory", memory, ("auto", "low"))
        super().__init__(batch_first=batch_first, memory=memory, verify=verify, shown=shown or ParamAttributes())
        self._model = model
        self._force_generic = force_generic
        self._given_whole = whole
        self._captures_model = False
        self.whole: dict[str, str] = {}
        """The modules that are run whole, by name, with the reason."""
        self._handles: list[RemovableHandle] = []
        self._layers: list[CapturedLayer] = []
        self._held: list[tuple[object, bool]] = []
        self._rules: Mapping[type[nn.Module], Rule] = {}
        self._modules: list[nn.Module] = []
        self._batch_norms: list[tuple[str, nn.Module]] = []
        self._attach()
        ended: Any = Notice(self._forward_ended)
        self._end = model.register_forward_hook(ended, always_call=True)

    def release_with(self, owner: object) -> None:
        """Restore the model when the owner is deleted before the model."""
        weakref.finalize(owner, _release, weakref.ref(self)).atexit = False

    def detach(self) -> None:
        """Restore the model."""
        self._remove()
        self._end.remove()
        self.attached = False
        self.discard()

    def discard(self) -> None:
        """Drop all gradients that have arrived, and what was shown of them."""
        self.clear()
        self.shown.clear()

    def norm_dtype(self) -> torch.dtype:
        """Float32, or float64 if a parameter is."""
        return torch.float64 if any(p.dtype == torch.float64 for p in self.params.values()) else torch.float32

    @override
    def buffers(self) -> Sequence[Tensor]:
        return list(self._model.buffers())

    @override
    def refresh(self) -> None:
        if self.is_outdated():
            self._attach()
        self.mixing.note(("modes", *(module.training for module in self._modules)))
        for name, module in self._batch_norms:
            _refuse(name, module, mixes(module))

    @override
    def is_outdated(self) -> bool:
        held = _held(self._model)
        lent = any(isinstance(x, Tensor) and not isinstance(x, nn.Parameter) for x, _ in held)
        if lent:
            return False  # functional_call replaces the parameters by other tensors, for this forward only
        if len(held) != len(self._held) or self._rules != RULES:
            return True
        return any(a is not b or p != q for (a, p), (b, q) in zip(held, self._held, strict=True))

    @override
    def whole_line(self, name: str) -> str:
        modules = dict(self._model.named_modules())
        path = name.split(".") if name else []
        around = [modules.get(".".join(path[:i])) for i in range(len(path) - 1, -1, -1)]
        kinds = [type(m).__name__ for m in around if m is not None and type(m).forward is not nn.Module.forward]
        kinds = [kind for i, kind in enumerate(kinds) if kind not in ("Sequential", *kinds[:i])]
        if not kinds:
            return ""
        further = "".join(f", or whole=({kind},)" for kind in kinds[1:3])
        return f". Or run the module around it sample by sample: whole=({kinds[0]},){further}"

    def _attach(self) -> None:
        """Capture every layer with trainable parameters.

        Raises:
            ValueError: If per-sample gradients of this model would be wrong, or something else captures it.
        """
        params = trainable(self._model)
        _check_model(self._model, params)
        whole = chosen_whole(self._model, self._given_whole)
        layers = list(self._found_layers(whole))
        self._remove()
        self.params, self._layers, self.whole = params, layers, whole
        self._captures_model = any(layer.module is self._model for layer in layers)
        self._held, self._rules, self._modules = _held(self._model), dict(RULES), list(self._model.modules())
        self._batch_norms = [(name, m) for name, m in self._model.named_modules() if may_mix(m)]
        self.owners = Counter(id(param) for layer in layers for param in layer.params.values())
        began: Any = Notice(self._forward_began, only_with_gradients=True)
        self._handles = [self._model.register_forward_pre_hook(began, with_kwargs=True)]
        for name, param in params.items():
            self._handles.append(param.register_hook(Outside(name, self._refuse_outside)))
        for layer in layers:
            layer.module.__dict__["forward"] = CapturedForward(layer)
        self.attached = True

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            own = layer.module.__dict__.get("forward")
            if isinstance(own, CapturedForward) and own.layer is layer:
                del layer.module.__dict__["forward"]
        self._handles, self._layers = [], []

    def _found_layers(self, whole: Mapping[str, str]) -> Iterator[CapturedLayer]:
        """The layers to capture: those with a rule, and other modules with parameters of their own."""
        seen: set[int] = set()
        inside: set[int] = set()
        for name, module in self._model.named_modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            _refuse(name, module, refusal(module, batch_first=self.batch_first) or mixes(module))
            if id(module) in inside:
                continue
            rule, params = WHOLE if name in whole else rule_for(module), trainable(module)
            if rule is None or not params:
                continue
            _refuse(name, module, rule.refusal(module))
            if self._force_generic and not rule.covers_submodules:
                rule = WHOLE
            if rule.covers_submodules:
                inside.update(id(child) for child in module.modules())
            elif rule is BARE:
                own = set(own_params(module))
                params = {key: param for key, param in params.items() if id(param) in own}
            if self._is_replaced(module):
                raise ValueError(
                    f"{_described(name, module)} has a forward of its own, set on the instance: "
                    "another clipper is attached to it, which has to be detached first, or something replaced it"
                )
            yield CapturedLayer(self, name, module, rule, params)

    def _is_replaced(self, module: nn.Module) -> bool:
        """True if the instance has another forward than its class. Copies of models have that of their class."""
        own = module.__dict__.get("forward")
        if isinstance(own, CapturedForward) and own.layer.recording is self:
            return False
        return own is not None and getattr(own, "__func__", None) is not type(module).forward

    def _refuse_outside(self, name: str) -> None:
        if self.enabled and self.attached:
            self.clear()
            raise RuntimeError(
                f"{name!r} got a gradient from outside the call of its layer, where samples are not told apart. "
                "Either the forward ran before the clipper was attached, or the parameter is used by another module or "
                "by the loss: call its own module instead, or freeze it. Or another tensor is made of it in a hook, as "
                f"torch.nn.utils.weight_norm does: use torch.nn.utils.parametrizations{self.whole_line(name)}"
            )

    def _forward_began(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.inside or in_backward():
            return
        if self.enabled and DistributedDataParallel._active_ddp_module is not None:
            raise RuntimeError("module is run by DistributedDataParallel, which would not average its gradients")
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        before = self._captures_model
        self.begin(Forward(inputs, self.batch_dim, captured=self.enabled))
        if self._captures_model and not before:
            raise RuntimeError(
                "the module itself got parameters that train, after its forward had been called: call it once more"
            )
        self.phase = Phase.FORWARD

    def _forward_ended(self, args: tuple[Any, ...], output: Any) -> None:
        if self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE
            self.outputs += [weakref.ref(x) for x in pytree.tree_leaves(output) if type(x) is Tensor]


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of a module, by name."""
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def _release(engine: "weakref.ref[Engine]") -> None:
    alive = engine()
    if alive is not None:
        alive.detach()


def _held(model: nn.Module) -> list[tuple[object, bool]]:
    """The modules and parameters of a model, and which parameters are trainable, to detect changes.

    It runs in every forward, so it reads the dictionaries, which is faster than `named_parameters`.
    """
    held: list[tuple[object, bool]] = []
    for module in model.modules():
        held.append((module, False))
        held += [(param, param.requires_grad) for param in module._parameters.values() if param is not None]
    return held


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


def _refuse(name: str, module: nn.Module, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"{_described(name, module)} cannot be clipped per sample: {reason}")


def _described(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else type(module).__name__
