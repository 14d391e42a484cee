"""Clips the gradient of every sample, with one backward for all of them."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.checks import boolean, instance, one_of
from torchzero_clip.hints import Explained
from torchzero_clip.per_sample.capture import Phase
from torchzero_clip.per_sample.engine import Engine
from torchzero_clip.per_sample.gradients.contributions import Contribution, Memory
from torchzero_clip.per_sample.hooks import replace_gradients
from torchzero_clip.per_sample.layer import trainable
from torchzero_clip.per_sample.norm_clippers import NormClipper, checked_norm_clipper
from torchzero_clip.per_sample.samples.prover import Verify
from torchzero_clip.per_sample.weighting import ClippingResult, NonfiniteSample, clipped_backward, weighed
from torchzero_clip.per_sample.whole import Whole

LossReduction: TypeAlias = Literal["mean", "sum"]


class PerSampleGradientClipper(Explained):
    """Makes ``.grad`` the sum or mean of per-sample gradients, each scaled so that its norm is at most a limit.

        grad = Σᵢ cᵢ · gᵢ   (mean: divided by B),   cᵢ = min(1, C / (‖gᵢ‖ + 1e-6))

    It needs one forward and one backward of the module, does not wrap the module, and works with any optimizer. During
    the backward, it computes the norms of the samples from the input of each layer and the gradient of its output. The
    factors follow from the norms. After the backward, it computes the clipped sums.

    It captures every forward of the module with gradients enabled, in training and in eval mode, except in a block of
    `paused()`. It stops at `detach()`, at the end of a ``with`` block, or when the clipper is deleted. Parameters
    outside of the module are not clipped. After a ``loss.backward()`` without `clip_and_accumulate`, the next forward
    raises, and so does the next step of an optimizer over these parameters. This step also raises after a
    `clip_and_accumulate` without `pre_step`.

    With several processes, give it the model in `DistributedDataParallel`, or after `fully_shard`. Each process clips
    its own samples, and ``.grad`` gets the sum or mean over the samples of all processes.

    Args:
        module: The model. If a layer mixes samples, as BatchNorm does, the error names it.
        norm_clipper: Computes factors from norms: `ConstantFlatClipper`, `ConstantPerLayerClipper`, or your own
            subclass of `NormClipper`.
        batch_first: Whether sequences have shape (B, T, ...) rather than (T, B, ...).
        loss_reduction: With "mean", ``.grad`` is the mean over samples, and the loss before `clip_and_accumulate` must
            be a mean over samples too. With "sum", both are sums.
        memory: With "low", linear layers, convolutions and embeddings store no per-sample gradients. Some of them then
            need a second matmul.
        nonfinite: For samples whose gradient has an inf or a NaN: "zero" excludes and reports them, "raise" raises.
        keep_grad_samples: Store the per-sample gradients as ``p.grad_sample`` of shape (B, *p.shape), from the backward
            until `clip_and_accumulate` or the next forward. They take B times the memory of the model.
        whole: Modules that run sample by sample together with their submodules: classes, or patterns for names, such as
            ``"encoder.layers.*"``. Use it for modules that cannot be captured layer by layer; error messages contain
            the line to write. It takes memory for B gradients of the parameters of these modules.
        verify: When a known graph is proved again. A proof finds the sample of each row, and shows that samples do not
            mix. With "first", in the steps 1, 2, 4, 8, ... and every 128th; with a number n, every n-th instead; with
            "always", in all steps; with "never", in none. New graphs, and those in which values move rows, are always
            proved.

    Raises:
        ValueError: If a layer mixes samples or cannot be captured, or the value of an argument is invalid.
        TypeError: If an argument has the wrong type.

    | gradient of a sample | what happens |
    | --- | --- |
    | norm 0 | factor 1 |
    | norm just above the limit C | scaled to C · (1 - 1e-6 / C): at most C · (1 + 1e-6), rounding included |
    | an inf or a NaN | the sample is excluded and marked in ``result.nonfinite``; RuntimeError with "raise" |
    | finite and not 0, of any size | its norm is finite and not 0 |
    | a layer that the forward did not use | counts as a gradient of 0 |
    | B = 0 | gradients of zeros |

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper
        >>> model = nn.Linear(2, 1, bias=False)
        >>> clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
        >>> losses = model(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).squeeze(1)  # one for each sample
        >>> result = clipper.backward(losses)
        >>> result.norms, result.factors
        (tensor([5.0000, 0.5000]), tensor([0.2000, 1.0000]))
        >>> model.weight.grad
        tensor([[0.3000, 0.6500]])

    Source: Abadi et al., [Deep learning with differential privacy](https://arxiv.org/abs/1607.00133), 2016; Bu et al.,
    [Differentially private optimization on large model at small cost](https://arxiv.org/abs/2210.00038), 2022. This
    class adds no noise; clipping without noise gives no privacy.
    """

    _private: ClassVar[bool] = False  # True in `PrivateGradientClipper`

    def __init__(
        self,
        module: nn.Module,
        norm_clipper: NormClipper,
        batch_first: bool = True,
        loss_reduction: LossReduction = "mean",
        *,
        memory: Memory = "auto",
        nonfinite: NonfiniteSample = "zero",
        keep_grad_samples: bool = False,
        whole: Whole = (),
        verify: Verify = "first",
    ) -> None:
        one_of("loss_reduction", loss_reduction, ("mean", "sum"))
        one_of("nonfinite", nonfinite, ("zero", "raise"))
        boolean("keep_grad_samples", keep_grad_samples)
        self.loss_reduction: LossReduction = loss_reduction
        self.nonfinite: NonfiniteSample = nonfinite
        checked_norm_clipper(norm_clipper)  # before the module, because it explains arguments in the wrong order
        instance("module", module, nn.Module)
        norm_clipper.check_count(len(trainable(module)))
        self._norm_clipper = norm_clipper
        self._engine = Engine(
            module,
            batch_first=batch_first,
            memory=memory,
            whole=whole,
            verify=verify,
            of_mean=loss_reduction == "mean",
            keep_grad_samples=keep_grad_samples,
            private=self._private,
        )
        self._engine.release_with(self)
        self._sums: dict[str, Tensor] = {}
        self._count = 0
        self._thresholds: Tensor | None = None

    @property
    def whole(self) -> dict[str, str]:
        """The names of modules that run sample by sample with their submodules, and the reason for each."""
        return dict(self._engine.attachment.whole)

    @property
    def norm_clipper(self) -> NormClipper:
        """Computes factors from norms. You may replace it between steps."""
        return self._norm_clipper

    @norm_clipper.setter
    def norm_clipper(self, value: NormClipper) -> None:
        checked_norm_clipper(value)
        value.check_count(len(self._engine.params))
        self._norm_clipper = value

    @override
    def __repr__(self) -> str:
        return f"PerSampleGradientClipper({self._norm_clipper!r}, loss_reduction={self.loss_reduction!r})"

    def backward(self, losses: Tensor) -> ClippingResult:
        """Add the sum of the clipped gradients to ``.grad``; with "mean", the sum divided by the B of this call.

        For exact accumulation over calls with different B, use "sum" or `clip_and_accumulate`.

        Args:
            losses: One loss for each sample, of shape (B,), as ``reduction="none"`` gives.

        Raises:
            ValueError: If the losses do not have that shape, or a layer saw another number of samples.
            TypeError: If ``losses`` is not a tensor.
            RuntimeError: If the forward ran before the clipper was attached, if a parameter was used outside the call
                of its layer, or for a non-finite sample with ``nonfinite="raise"``. ``.grad`` does not change.
        """
        mean = self.loss_reduction == "mean"
        return clipped_backward(self._engine, losses, self._norm_clipper, mean=mean, nonfinite=self.nonfinite)

    def clip_and_accumulate(self, batch_size: int | None = None) -> ClippingResult:
        """Clip the gradients of the last ``loss.backward()``, and add them to the sums for `pre_step`.

        Args:
            batch_size: The number of samples. It is needed if no argument of the forward is a tensor, or if one call of
                the module used an output of another. With several processes, a process without samples may pass 0
                instead of calling ``loss.backward()``.

        Raises:
            RuntimeError: If there was no backward, or for a non-finite sample with ``nonfinite="raise"``.
            ValueError: If a layer saw another number of samples than the others, or than ``batch_size``, or if
                ``batch_size`` is needed. Also for several calls of the module, unless one used an output of another.
        """
        engine, mean = self._engine, self.loss_reduction == "mean"
        with engine.processes.start("clip_and_accumulate", engine.params, mean):
            gathered, count = self._waiting(batch_size)
            found = weighed(engine, gathered, self.norm_clipper, self.nonfinite)
        processes, params = engine.processes, engine.params
        used = processes.used({name for name, *_ in found.parts}, params) if processes.sharded else ()
        for name, value in processes.collected(found.sums(), params, used).items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            engine.accumulated.add(id(params[name]))
        self._count += count
        limits = self.norm_clipper.thresholds
        self._thresholds = limits if self._thresholds is None else torch.maximum(self._thresholds, limits)
        return found.result

    def _waiting(self, batch_size: int | None) -> tuple[dict[int, tuple[Contribution, Tensor]], int]:
        """Take the gradients that wait, and their number of samples."""
        engine = self._engine
        if not engine.captured.by_param and engine.phase is not Phase.BACKWARD:
            if batch_size == 0 and engine.processes.group is not None:
                return {}, 0
            raise RuntimeError(
                "no gradients have arrived: run a forward with gradients enabled, and call loss.backward() first"
            )
        engine.check_joined()
        if batch_size is None:
            engine.captured.check_one_batch()
        try:
            return engine.gathered(batch_size), engine.captured.batch_size
        finally:
            engine.discard()

    def pre_step(self) -> tuple[Tensor, int]:
        """Set ``.grad`` to the accumulated sums, with "mean" divided by the number of samples, and reset the sums.

        Returns:
            The norm of the vector of limits, repeated for each trainable parameter, and the number of samples, of all
            processes.

        Raises:
            ValueError: If there was no `clip_and_accumulate` since the last `pre_step`.
        """
        params, processes, mean = self._engine.params, self._engine.processes, self.loss_reduction == "mean"
        # 0 stands for the limit of a process that has accumulated nothing
        limits = torch.zeros(1, dtype=torch.float64, device="cpu") if self._thresholds is None else self._thresholds
        with processes.start("pre_step", params, mean) as start:
            limit = torch.linalg.vector_norm(limits).item()
            start.numbers = {"samples": self._count, "accumulated": self._thresholds is not None, "limit": limit}
        if not start.anywhere("accumulated"):
            raise ValueError("nothing was accumulated: call clip_and_accumulate() after loss.backward() first")
        count = start.total("samples")
        divisor = float(max(count, 1)) if mean else 1.0  # without samples, the sums are zeros
        sums = {name: value / divisor for name, value in self._sums.items()}
        sums = processes.added_up(sums, params, params)
        replace_gradients(
            [(param, sums[name] if name in sums else torch.zeros_like(param)) for name, param in params.items()]
        )
        max_norm = torch.full((len(params),), start.largest("limit"), dtype=limits.dtype, device="cpu")
        self._sums, self._count, self._thresholds = {}, 0, None
        self._engine.accumulated.clear()
        return max_norm, count

    def discard(self) -> None:
        """Drop the gradients of the last backward without clipping them."""
        self._engine.discard()

    def rows(self, *samples: Tensor, batch_size: int) -> AbstractContextManager[None]:
        """Return a context in which forwards of the module get rows of several samples, such as the nodes of graphs.

        `backward` finds the sample of each row itself, and only needs ``batch_size`` if no argument of the module has
        that size. Before `clip_and_accumulate`, the samples of the rows of outputs are believed. Blocks may not be
        nested. The backward may run after the block.

        Args:
            *samples: The sample that each row belongs to: a vector of integers for each number of rows.
            batch_size: The number of samples.

        Raises:
            ValueError: If a vector has other values than 0 to ``batch_size`` - 1, or two vectors of one length differ.
                Also if there are as many rows as samples, in another order: other arguments may have samples.
            TypeError: If ``samples`` are not tensors of integers, or ``batch_size`` is not an integer.
            RuntimeError: If a block of this kind is open.

        Examples:
            >>> import torch
            >>> from torch import nn
            >>> from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper
            >>> model = nn.Linear(1, 1, bias=False)
            >>> clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
            >>> graph_of_node = torch.tensor([0, 0, 1])
            >>> with clipper.rows(graph_of_node, batch_size=2):
            ...     outputs = model(torch.tensor([[1.0], [2.0], [4.0]]))
            >>> losses = torch.zeros(2).index_add(0, graph_of_node, outputs.squeeze(1))
            >>> clipper.backward(losses).norms
            tensor([3., 4.])
        """
        return self._engine.rows(samples, batch_size)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which the module runs as if there were no clipper.

        ``loss.backward()`` adds to ``.grad``, and `torch.autograd.grad` returns gradients of parameters. Use it for
        gradients of validation data, for example. Blocks may be nested. The clipper captures again when the outermost
        block ends, also if an exception ends it. Gradients that wait for `clip_and_accumulate` keep waiting.

        Run the backward where its forward ran:

        | forward | backward | what happens |
        | --- | --- | --- |
        | inside | inside | ordinary gradients |
        | outside | inside | RuntimeError; the same backward after the block is clipped as usual |
        | inside | outside | RuntimeError, and gradients that wait are dropped |
        | outside | outside, with a block between them | clipped as usual |

        Raises:
            RuntimeError: If `backward` is called in the block.

        Examples:
            >>> import torch
            >>> from torch import nn
            >>> from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper
            >>> model = nn.Linear(2, 1, bias=False)
            >>> clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
            >>> with clipper.paused():
            ...     torch.autograd.grad(model(torch.tensor([[3.0, 4.0]])).sum(), model.weight)
            (tensor([[3., 4.]]),)
        """
        return self._engine.paused()

    def detach(self) -> None:
        """Stop clipping, and restore the module. `pre_step` still works for sums accumulated before."""
        self._engine.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()
