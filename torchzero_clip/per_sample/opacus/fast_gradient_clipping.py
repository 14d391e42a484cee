"""Per-sample norms and clipping coefficients by a wrapper around the model, for loops that use such a wrapper."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.checks import boolean, instance, non_negative, one_of
from torchzero_clip.per_sample.captured_layer import CapturedLayer
from torchzero_clip.per_sample.clipper import LossReduction
from torchzero_clip.per_sample.gradients.captured_gradients import Forward
from torchzero_clip.per_sample.layer import layer_text, trainable
from torchzero_clip.per_sample.norm_clippers import ConstantFlatClipper
from torchzero_clip.per_sample.opacus.two_passes import TwoPassEngine
from torchzero_clip.per_sample.rules.copies import EMPTY
from torchzero_clip.per_sample.rules.generic import GENERIC
from torchzero_clip.per_sample.rules.registry import mixes, refusal
from torchzero_clip.per_sample.samples.prover import Verify
from torchzero_clip.per_sample.weighting import ClippingResult, clipped_backward
from torchzero_clip.per_sample.whole import Whole

# attributes of the wrapper; all others are set in the model
OWN = {"loss_reduction", "max_grad_norm", "_settings", "_engine"}


class GradSampleModuleFastGradientClipping(nn.Module):
    """A wrapper of a model that computes per-sample gradient norms, and the coefficients that clip these gradients.

        coef = min(1, max_grad_norm / (norm + 1e-6))

    It calls the model, and has the model's attributes, parameters and state_dict. Clipping takes one backward with
    ``module.backward(losses)``. It takes two backwards in loops of this form:

        losses.mean().backward(retain_graph=True)      leaves .grad unchanged
        coef = module.get_clipping_coef()
        module.disable_hooks()
        (coef * losses).mean().backward()              ordinary gradients, of the same graph
        module.enable_hooks()

    `PerSampleGradientClipper` does the same without a wrapper; both use the same engine.

    Args:
        m: The model.
        batch_first: Whether sequences have shape (B, T, ...) rather than (T, B, ...).
        loss_reduction: "mean" or "sum": how the loss is reduced over the samples before the backward.
        strict: Raise for models with buffers, because samples may influence each other through buffers.
        force_functorch: Run every layer by the generic rule, which uses vmap.
        max_grad_norm: The limit, >= 0, in units of the gradient.
        use_ghost_clipping: Compute norms without storing per-sample gradients, as ``memory="low"`` of
            `PerSampleGradientClipper`. With False, layers store them if that is faster and takes no more memory;
            results are the same.
        whole: As in `PerSampleGradientClipper`.
        verify: As in `PerSampleGradientClipper`.

    Raises:
        NotImplementedError: If ``strict`` is True and the model has a buffer.
        ValueError: If a layer mixes samples or cannot be captured, or the value of an argument is invalid.
        TypeError: If an argument has the wrong type.

    ``module.backward`` treats norms of 0, inf and NaN as `PerSampleGradientClipper` does. For these norms,
    `get_clipping_coef` returns 1, 0 and NaN. With norms of inf and NaN, a second backward gives NaN gradients.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torchzero_clip import GradSampleModuleFastGradientClipping
        >>> model = GradSampleModuleFastGradientClipping(nn.Linear(2, 1, bias=False))
        >>> losses = model(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).squeeze(1)
        >>> losses.mean().backward(retain_graph=True)
        >>> model.get_norm_sample(), model.get_clipping_coef()
        (tensor([5.0000, 0.5000]), tensor([0.2000, 1.0000]))
        >>> model.weight.norm_sample, model.weight.grad
        (tensor([5.0000, 0.5000]), None)

    Source: Lee, Kifer, [Scaling up differentially private deep learning with fast per-example gradient
    clipping](https://arxiv.org/abs/2009.03106), 2020; Li et al., [Large language models can be strong differentially
    private learners](https://arxiv.org/abs/2110.05679), 2021.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: LossReduction = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float = 1,
        use_ghost_clipping: bool = True,
        whole: Whole = (),
        verify: Verify = "first",
    ) -> None:
        super().__init__()
        instance("m", m, nn.Module)
        one_of("loss_reduction", loss_reduction, ("mean", "sum"))
        for name, value in (("strict", strict), ("force_functorch", force_functorch)):
            boolean(name, value)
        non_negative("max_grad_norm", max_grad_norm)
        boolean("use_ghost_clipping", use_ghost_clipping)
        if strict:
            _refuse_buffers(m, batch_first=batch_first)
        for shown in ("_parameters", "_buffers", "_modules"):  # the same dicts: what m gets later, this module has too
            self.__dict__[shown] = m.__dict__[shown]
        self.__dict__["_module"] = m  # an attribute would be a submodule, of this module and so of m itself
        self.loss_reduction: LossReduction = loss_reduction
        self.max_grad_norm = max_grad_norm
        self._settings: dict[str, object] = {
            "memory": "low" if use_ghost_clipping else "auto",
            "batch_first": batch_first,
            "force_generic": force_functorch,
            "whole": whole,
            "verify": verify,
        }
        self._attach()

    def _attach(self) -> None:
        of_mean = self.loss_reduction == "mean"
        self._engine = TwoPassEngine(self.__dict__["_module"], of_mean=of_mean, **self._settings)
        self._engine.release_with(self)

    @override
    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_engine"}

    @override
    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._attach()

    @override
    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.__dict__["_module"](*args, **kwargs)

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_module" not in self.__dict__:  # while a copy is made
                raise
            return getattr(self.__dict__["_module"], name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if "_module" in self.__dict__ and name not in self.__dict__ and name not in OWN:
            setattr(self.__dict__["_module"], name, value)
        else:
            super().__setattr__(name, value)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the ``state_dict`` of the model."""
        return self.__dict__["_module"].state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a ``state_dict`` into the model."""
        return self.__dict__["_module"].load_state_dict(*args, **kwargs)

    @override
    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        self.__dict__["_module"]._load_from_state_dict(*args, **kwargs)

    @override
    def train(self, mode: bool = True) -> "GradSampleModuleFastGradientClipping":
        """Set the mode of the model and of this wrapper."""
        self.__dict__["_module"].train(mode)
        return super().train(mode)

    def get_norm_sample(self) -> Tensor:
        """Return the norms of the per-sample gradients of the last backward, over all trainable parameters: (B,).

        Raises:
            RuntimeError: If there was no backward since the last forward.
        """
        norms = self._engine.read_norms()
        if norms is None:
            raise RuntimeError("there are no norms: call backward() on a loss of this module's output first")
        return norms

    def get_clipping_coef(self) -> Tensor:
        """Return the factors that multiply the losses in the second backward: (B,), at most 1.

        Raises:
            RuntimeError: If there was no backward since the last forward.
        """
        return next(iter(ConstantFlatClipper(self.max_grad_norm).calc_clipping_factors([self.get_norm_sample()])))

    def backward(self, losses: Tensor) -> ClippingResult:
        """Add the sum of the clipped gradients to ``.grad``, with "mean" divided by B, in one backward.

        Args:
            losses: One loss for each sample, of shape (B,).

        Raises:
            ValueError: If the losses do not have that shape, or a layer saw another number of samples.
            TypeError: If ``losses`` is not a tensor.
            RuntimeError: As in `PerSampleGradientClipper.backward`.
        """
        clipper = ConstantFlatClipper(self.max_grad_norm)
        result = clipped_backward(self._engine, losses, clipper, mean=self.loss_reduction == "mean")
        self._engine.norms = result.norms
        return result

    def capture_backprops_hook(
        self,
        module: nn.Module,
        _forward_input: Sequence[Tensor],
        forward_output: Sequence[Tensor],
        loss_reduction: LossReduction,
        batch_first: bool,
    ) -> None:
        """Pass the gradient of an output yourself, for a call that was not captured. The module runs again under vmap.

        A gradient without a graph is not proved: entry i of the gradient must belong to sample i of the inputs only.
        All calls in a forward of this wrapper are captured. Do not pass their gradients, because they would count
        twice.

        Args:
            module: A module of the model.
            _forward_input: The inputs of the call.
            forward_output: A sequence of one item: the gradient of the output of the call.
            loss_reduction: How the loss of this gradient is reduced over the samples.
            batch_first: The ``batch_first`` of this wrapper.

        Raises:
            ValueError: If ``batch_first`` is not that of this wrapper, or the inputs have no batch dimension.
        """
        one_of("loss_reduction", loss_reduction, ("mean", "sum"))
        if batch_first != self._engine.batch_first:
            raise ValueError(f"batch_first must be {self._engine.batch_first}, as in the constructor")
        (grad,), inputs = forward_output, tuple(x.detach() for x in _forward_input)
        size = inputs[0].shape[0 if batch_first else 1]
        self._engine.forward = Forward(inputs, 0 if batch_first else 1)
        self._engine.forward.outside_model = True  # no output of the model is known, so each row counts as a sample
        layer = CapturedLayer(self._engine, type(module).__name__, module, GENERIC, trainable(module), EMPTY)
        scale = {("mean", "sum"): size, ("sum", "mean"): 1 / max(size, 1)}.get((loss_reduction, self.loss_reduction), 1)
        with torch.enable_grad():
            torch.autograd.backward(GENERIC.run(layer, *inputs), grad * scale)

    def disable_hooks(self) -> None:
        """Stop capturing, so that backwards give ordinary gradients."""
        self._engine.enabled = False

    def enable_hooks(self) -> None:
        """Capture forwards and backwards again."""
        self._engine.enabled = True

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which the model runs as if there were no wrapper: see `PerSampleGradientClipper.paused`.

        After `disable_hooks`, a backward of an earlier forward gives ordinary gradients. In this context it raises.
        """
        return self._engine.paused()

    def detach(self) -> None:
        """Stop capturing permanently, and restore the model."""
        self._engine.detach()


def _refuse_buffers(model: nn.Module, *, batch_first: bool) -> None:
    for name, module in model.named_modules():
        if list(module.buffers(recurse=False)):
            reason = refusal(module, batch_first=batch_first) or mixes(module)
            way_out = "use strict=False if it does not, and check_per_sample to be sure"
            raise NotImplementedError(
                f"{layer_text(name, module)} includes a buffer: {reason or f'it may mix samples. {way_out}'}"
            )
