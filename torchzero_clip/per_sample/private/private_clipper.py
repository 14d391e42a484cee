"""The Gaussian mechanism of DP-SGD: clipped sums, noise, and a divisor that does not depend on the data."""

import math
import weakref
import zlib
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from torchzero_clip.checks import count, finite, instance, number, one_of, positive
from torchzero_clip.compat import current_graph_task_id, is_distributed
from torchzero_clip.functional.shards import distributed_like, local
from torchzero_clip.per_sample.clipper import PerSampleGradientClipper
from torchzero_clip.per_sample.gradients.contributions import Memory
from torchzero_clip.per_sample.hooks import before_steps, replace_gradients
from torchzero_clip.per_sample.layer import trainable
from torchzero_clip.per_sample.norm_clippers import NormClipper
from torchzero_clip.per_sample.private.noise import gaussian, of_rank
from torchzero_clip.per_sample.private.promises import (
    Buffers,
    check_within,
    fixed_buffers,
    joint_limit,
    refuse_other_leaves,
)
from torchzero_clip.per_sample.processes.agreement import Agreement
from torchzero_clip.per_sample.processes.sharding import group_of_shards, reshard
from torchzero_clip.per_sample.samples.prover import Verify
from torchzero_clip.per_sample.weighting import ClippingResult, clipped_sums, weighed
from torchzero_clip.per_sample.whole import Whole
from torchzero_clip.private_losses import private_ids, refuse_loss, refuse_losses_of


class PrivateGradientClipper(PerSampleGradientClipper):
    """Makes ``.grad`` the noisy mean of clipped gradients of samples, as DP-SGD needs it.

        grad = (Σᵢ cᵢ · gᵢ + N(0, (noise_multiplier · S)²)) / expected_batch_size

    S is the norm of the vector of limits: the most that one sample can add to the sum. `backward` adds clipped
    gradients to sums of the clipper's own, and `pre_step` releases the sums with noise. Everything that reads only
    ``.grad`` and parameters afterwards has the same guarantee. [Private training](private_training.md) states it, and
    what else it needs.

    Args:
        module: The model. All parameters that train must be in it. With several processes, it must be in a
            `DistributedDataParallel`, where one process adds noise and all get the same ``.grad``, or sharded by
            `fully_shard` over all processes, where each adds noise to its shards. Parameters that are not sharded
            get one noise for all.
        norm_clipper: Computes factors from norms: `ConstantFlatClipper`, `ConstantPerLayerClipper`, `AutomaticClipper`,
            or your own subclass of `NormClipper`. Its limits must be finite.
        batch_first: Whether sequences have shape (B, T, ...) rather than (T, B, ...).
        noise_multiplier: The standard deviation of the noise, in units of S, >= 0. You may change it between steps.
            With a `second_noise_multiplier`, that of both releases together.
        expected_batch_size: The divisor: the size of the data set times the rate of the draw. Never the size of a
            batch that was drawn, because that depends on the data.
        generator: Draws the noise, for tests. Whoever knows its state can subtract the noise. By default, the noise
            comes from the random numbers of the operating system. The noise of shards also depends on the process.
        memory: As in `PerSampleGradientClipper`.
        nonfinite: "zero": samples whose gradient has an inf or a NaN add zeros. "raise" is refused, because an error
            would tell that there is such a sample.
        whole: As in `PerSampleGradientClipper`.
        verify: As in `PerSampleGradientClipper`, but at least every 16th step is proved, and "never" is refused. A
            proof also raises for gates and masks between samples, and for rows whose gradients are too large or too
            small.

    Raises:
        ValueError: If an argument is invalid, a layer mixes samples or cannot be captured, a `DistributedDataParallel`
            broadcasts buffers, or there are several processes and ``module`` is not spread over all of them.
        TypeError: If an argument has the wrong type.

    | case | what happens |
    | --- | --- |
    | no sample was drawn | `pre_step` releases noise |
    | parameters in bfloat16 or float16 | sums and noise are float32, and rounded after the noise |
    | a sample with an inf or a NaN | adds zeros; where values move rows, `backward` raises |
    | the limit 0 | zeros without noise |

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torchzero_clip import ConstantFlatClipper, PrivateGradientClipper
        >>> model = nn.Linear(2, 1, bias=False)
        >>> limit = ConstantFlatClipper(1.0)
        >>> clipper = PrivateGradientClipper(model, limit, noise_multiplier=1.0, expected_batch_size=8)
        >>> result = clipper.backward(model(torch.randn(6, 2)).squeeze(1))  # 6 samples were drawn
        >>> max_norms, count = clipper.pre_step()  # .grad is the noisy mean
        >>> clipper.releases
        {1.0: 1}

    Source: Abadi et al., [Deep learning with differential privacy](https://arxiv.org/abs/1607.00133), 2016.
    """

    _private = True

    def __init__(
        self,
        module: nn.Module,
        norm_clipper: NormClipper,
        batch_first: bool = True,
        *,
        noise_multiplier: float,
        expected_batch_size: float,
        generator: torch.Generator | None = None,
        memory: Memory = "auto",
        nonfinite: Literal["zero"] = "zero",
        whole: Whole = (),
        verify: Verify = "first",
    ) -> None:
        one_of("nonfinite", nonfinite, ("zero",))
        if verify == "never":
            raise ValueError("verify must not be 'never': the guarantee does not hold if samples mix")
        if generator is not None:
            instance("generator", generator, torch.Generator)
        _check_processes(module)
        self._second_noise_multiplier = math.inf  # first, because the next setter compares with it
        self.noise_multiplier = noise_multiplier
        self.expected_batch_size = expected_batch_size
        super().__init__(module, norm_clipper, batch_first, "sum", memory=memory, whole=whole, verify=verify)
        self._generator = generator
        self._releases: dict[float, int] = {}
        self._sensitivity: float | None = None  # of the sums that wait
        attachment, sharded = self._engine.attachment, self._engine.processes.sharded
        self._buffers = Buffers(self._engine.model)
        refuse_losses_of(self)
        # before the hook of fully_shard, which shows other parameters, and waits for the forwards of all processes
        attachment.before_forward(self._buffers.forward_began, prepend=sharded)
        if sharded:
            attachment.before_forward(partial(_forward_began, weakref.ref(self)), prepend=True)
        before_steps(self, PrivateGradientClipper._refuse_step)  # unbound, so that it keeps no clipper alive

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise, in units of the joint limit. You may change it between steps."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        finite("noise_multiplier", value)
        _check_share(value, self._second_noise_multiplier)
        self._noise_multiplier = float(value)

    @property
    def second_noise_multiplier(self) -> float:
        """The noise multiplier of another release in each step, such as a noisy count of samples; inf without one.

        It is the standard deviation of the noise of that release, over the most by which one sample changes it, and
        above `noise_multiplier`. The gradients get more noise, so that both together have `noise_multiplier`, under
        which they count as one release.
        """
        return self._second_noise_multiplier

    @second_noise_multiplier.setter
    def second_noise_multiplier(self, value: float) -> None:
        number("second_noise_multiplier", value)
        _check_share(self._noise_multiplier, value)
        self._second_noise_multiplier = float(value)

    @property
    def expected_batch_size(self) -> float:
        """The divisor of the noisy sums."""
        return self._expected_batch_size

    @expected_batch_size.setter
    def expected_batch_size(self, value: float) -> None:
        positive("expected_batch_size", value)
        finite("expected_batch_size", value)
        self._expected_batch_size = float(value)

    @property
    def releases(self) -> dict[float, int]:
        """How many steps were released with each noise multiplier, for an accountant."""
        return dict(self._releases)

    @override
    def __repr__(self) -> str:
        settings = f"noise_multiplier={self._noise_multiplier}, expected_batch_size={self._expected_batch_size}"
        return f"PrivateGradientClipper({self._norm_clipper!r}, {settings})"

    @override
    def backward(self, losses: Tensor) -> ClippingResult:
        """Add the sum of the clipped gradients to the sums of this step. ``.grad`` does not change.

        Call it any number of times before `pre_step`. The result is private: norms, factors and the number of samples
        are computed from the data without noise.

        Args:
            losses: One loss for each sample, of shape (B,), as ``reduction="none"`` gives.

        Raises:
            ValueError: If the losses do not have that shape, a layer saw another number of samples, or the limits are
                not finite.
            TypeError: If ``losses`` is not a tensor.
            RuntimeError: As `PerSampleGradientClipper.backward` raises. Also if a tensor outside of the module would
                get a gradient, if it cannot be checked whether samples mix, if a buffer, a frozen parameter or a limit
                has changed since the step began, or if a gradient is above the limit after clipping. Nothing changes.
        """
        engine, params = self._engine, self._engine.params
        with self._start("backward") as start:
            instance("losses", losses, Tensor)
            sensitivity = self._checked_sensitivity()
            refuse_other_leaves(losses, {id(engine.anchor), *map(id, params.values())})
            # a wrong shape counts as one sample, so that all processes go on to `clipped_sums`, which raises
            count = losses.numel() if losses.ndim == 1 else 1
            start.numbers = {"samples": count, "limit": sensitivity, "clipper": _digest(self.norm_clipper)}
        _check_same_clipper(start)
        if not start.total("samples"):
            self._sensitivity = sensitivity
            return weighed(engine, {}, self.norm_clipper, "zero").result
        sums, _, result = clipped_sums(engine, losses, self.norm_clipper, mean=False)
        with engine.processes.agreement(params, 0):
            check_within(sensitivity, self.norm_clipper, result)
        self._sums = self._sums | {
            name: self._sums[name] + value if name in self._sums else value for name, value in sums.items()
        }
        self._count += len(losses)
        self._sensitivity = sensitivity
        return result

    @override
    def clip_and_accumulate(self, batch_size: int | None = None) -> NoReturn:
        """Not available: the classic form cannot check whether samples mix.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "a PrivateGradientClipper has no clip_and_accumulate(), which cannot check whether samples mix: call "
            "backward(losses) with one loss for each sample instead of loss.backward()"
        )

    @override
    @torch.no_grad()
    def pre_step(self) -> tuple[Tensor, int]:
        """Set ``.grad`` to the noisy mean of this step, count the release, and reset the sums.

        Call it in every step before the step of the optimizer, also if no sample was drawn. If a hook of a parameter
        raises, the release counts, because the hook has seen it, and the sums wait for the next call.

        Returns:
            The norm of the vector of limits, repeated for each trainable parameter, and the number of samples. The
            number is private.

        Raises:
            ValueError: If the limits are not finite.
            RuntimeError: If a buffer, a frozen parameter or a limit has changed since the step began.
        """
        with self._start("pre_step") as start:
            self._refresh()
            sensitivity = self._checked_sensitivity()
            start.numbers = {"samples": self._count, "limit": sensitivity, "clipper": _digest(self.norm_clipper)}
        _check_same_clipper(start)
        params, processes = self._engine.params, self._engine.processes
        # 1 / σ² of two Gaussian releases add up
        alone = self._noise_multiplier / math.sqrt(1 - (self._noise_multiplier / self._second_noise_multiplier) ** 2)
        std = alone * sensitivity
        generator = self._generator
        if processes.sharded and generator is not None:  # or shards would get equal noise
            generator = of_rank(generator, processes.rank)
        noisy: dict[str, Tensor] = {}
        for name, param in params.items():
            if processes.is_first or is_distributed(param):  # the first adds the noise for all, but not to their shards
                noisy[name] = self._noisy(name, param, std, generator)
            elif name in self._sums:
                noisy[name] = self._sums[name].clone()
        noisy = processes.added_up(noisy, params, params)
        means = [(param, noisy[name].div_(self._expected_batch_size)) for name, param in params.items()]
        self._releases = self._releases | {self._noise_multiplier: self._releases.get(self._noise_multiplier, 0) + 1}
        replace_gradients(means)
        self._next_step()
        return torch.full((len(params),), sensitivity, dtype=torch.float64, device="cpu"), start.total("samples")

    @override
    def discard(self) -> None:
        """Drop all gradients that were not released: those of the last backward, and the sums of this step."""
        super().discard()
        self._next_step()

    def state_dict(self) -> dict[str, Any]:
        """The number of releases with each noise multiplier. Save it after `pre_step`: it holds no sums."""
        return {"releases": dict(self._releases)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the number of releases.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If it is not the state of a `PrivateGradientClipper`.
        """
        releases = state_dict.get("releases")
        if set(state_dict) != {"releases"} or not isinstance(releases, dict):
            raise ValueError(f"state_dict must have the key 'releases' with a dict, got the keys {list(state_dict)}")
        for multiplier, steps in releases.items():
            finite("a noise multiplier in state_dict", multiplier)
            count(f"the number of releases with {multiplier}", steps)
        self._releases = {float(multiplier): steps for multiplier, steps in releases.items()}

    def released_params(self) -> Collection[Tensor]:
        """Return the parameters whose gradients this clipper releases."""
        engine = self._engine
        return engine.params.values() if engine.attached or self.waits else ()

    @override
    def __reduce__(self) -> NoReturn:
        raise TypeError("a PrivateGradientClipper cannot be pickled or copied: save its state_dict()")

    def _refuse_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Raise if a step over private parameters has a closure, comes before `pre_step`, or uses other gradients."""
        if has_closure:
            refuse_loss(optimizer.param_groups, "a closure")
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if set(map(id, self.released_params())).isdisjoint(map(id, params)):
            return
        if self.waits:
            raise RuntimeError(
                "private gradients wait to be released, and .grad does not contain them: call clipper.pre_step() "
                "before the step of the optimizer. clipper.discard() drops them"
            )
        private = private_ids()
        for param in params:
            if param.requires_grad and param.grad is not None and id(param) not in private:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} in the optimizer has a gradient that no "
                    "PrivateGradientClipper has released: train it in the module of the clipper, or freeze it. If the "
                    "gradient comes from public data only, use another optimizer for it"
                )

    @property
    def waits(self) -> bool:
        """True if there was a `backward` since the last `pre_step`."""
        return self._sensitivity is not None

    def _next_step(self) -> None:
        self._sums, self._count, self._sensitivity = {}, 0, None
        self._buffers.note()

    def _checked_sensitivity(self) -> float:
        """The most by which a sample changes the sum: the joint limit, the same in all calls of a step."""
        sensitivity = joint_limit(self.norm_clipper, len(self._engine.params))
        if self._sensitivity not in (None, sensitivity):
            raise RuntimeError(
                f"the joint limit was {self._sensitivity} in an earlier backward of this step, and is {sensitivity} "
                "now: change limits between pre_step() and the next backward. discard() drops the sums of this step"
            )
        if (name := self._buffers.changed()) is not None:
            raise RuntimeError(
                f"{name!r} has changed since the step began. A buffer or a frozen parameter may hold data, and has no "
                "noise: use layers without running statistics, such as GroupNorm, or set such layers to eval mode, and "
                "use no max_norm= of embeddings. discard() drops the gradients of this step"
            )
        return sensitivity

    def _start(self, call: str) -> Agreement:
        """Begin the agreement of a call, which also compares the mechanism."""
        mechanism = self._noise_multiplier, self._second_noise_multiplier, self._expected_batch_size, self.waits
        return self._engine.processes.start(call, self._engine.params, mechanism, sorted(self._releases.items()))

    def _refresh(self) -> None:
        """Capture the model again if it has changed since the last forward. Without samples, no forward did this."""
        attachment = self._engine.attachment
        if not attachment.is_outdated():
            return
        if self.waits:
            raise RuntimeError(
                "parameters of the module were frozen, unfrozen or replaced while gradients wait for pre_step(): "
                "discard() drops these gradients"
            )
        attachment.refresh()

    def _agree_on_forward(self) -> None:
        """Before a forward gathers shards, agree that all processes run one: otherwise some would wait forever."""
        if self._engine.enabled and not self._engine.pauses and current_graph_task_id() == -1:
            with self._start("forward"):
                pass

    def _noisy(self, name: str, param: Tensor, std: float, generator: torch.Generator | None) -> Tensor:
        """The sum of a parameter with noise, in new memory; of a sharded one, with the noise of the own shard."""
        noise = gaussian(local(param), std, generator)
        if name in self._sums:
            noise.add_(local(self._sums[name]).to(noise.device))
        return distributed_like(noise, param)


def _forward_began(reference: "weakref.ref[PrivateGradientClipper]", *_: object) -> None:
    if (clipper := reference()) is not None:
        clipper._agree_on_forward()


def _check_share(noise_multiplier: float, second: float) -> None:
    if not noise_multiplier < second:
        raise ValueError(f"second_noise_multiplier must be above noise_multiplier, {noise_multiplier}, got {second}")


def _check_processes(module: nn.Module) -> None:
    """Raise if several processes do not release one sum together."""
    together = isinstance(module, DistributedDataParallel)
    if together and module.broadcast_buffers and fixed_buffers(module):
        raise ValueError("DistributedDataParallel must have broadcast_buffers=False: buffers must not change in a step")
    if together or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    reshard(module)
    group = group_of_shards(module, trainable(module))
    if group is None:
        raise ValueError(
            "module must be in DistributedDataParallel or sharded by fully_shard if there are several processes: each "
            "of them would release its own gradients"
        )
    if dist.get_world_size(group) < dist.get_world_size():
        raise ValueError(
            f"module must be sharded over all {dist.get_world_size()} processes, got {dist.get_world_size(group)}: the "
            "processes of each group would release their own gradients"
        )


def _digest(norm_clipper: NormClipper) -> int:
    """A number of the class and all limits, to compare processes."""
    return zlib.crc32(repr((type(norm_clipper).__qualname__, norm_clipper.thresholds.tolist())).encode())


def _check_same_clipper(start: Agreement) -> None:
    limits = {*start.of_all("limit")}
    if len(limits) > 1:
        raise RuntimeError(f"the joint limit of norm_clipper must be the same on all processes, got {sorted(limits)}")
    if len({*start.of_all("clipper")}) > 1:
        raise RuntimeError("norm_clipper must have the same class and the same limits on all processes")
