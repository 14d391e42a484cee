"""Checks, in some steps, that the loss of a sample gives gradients to no other sample."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.checks import one_of
from torchzero_clip.compat import warn_user
from torchzero_clip.per_sample.gradients.autograd_graph import leaves_of, nodes_of

Verify: TypeAlias = Literal["first", "always", "never"] | int


class MixingCheck:
    """Decides when to check, and checks.

    A check is due when a layer decides for the first time where its samples are. It then runs in the steps 1, 2, 4, ...
    from there, until each sample has been sent backward without each other one, and goes on at powers of two for
    parameters that got no gradient in so many checks.
    """

    def __init__(self, verify: Verify) -> None:
        if isinstance(verify, bool) or not isinstance(verify, int) or verify < 1:
            one_of("verify", verify, ("first", "always", "never", "a number of steps, at least 1"))
        self._every = 1 if verify == "always" else verify if isinstance(verify, int) else 0
        self._never = verify == "never"
        self._decisions: set[Hashable] = set()
        self._seen: Counter[str] = Counter()
        self._steps = self._age = self._checks = 0
        self._generator = torch.Generator("cpu")  # of its own, so that the training draws the same numbers
        self._warned = False
        self.must_check = False
        """Raise where a check that is due cannot run, instead of a warning."""

    def note(self, decision: Hashable) -> None:
        """A layer has decided where its samples are. A decision that is new makes a check due."""
        if decision not in self._decisions:
            self._decisions.add(decision)
            self._age = self._checks = 0
            self._seen.clear()

    def is_due(self, losses: Tensor) -> bool:
        """True if this step has to be checked."""
        if self._never or len(losses) < 2 or not losses.requires_grad:
            return False
        if self._every and self._steps % self._every == 0:
            return True
        age, needed = self._age + 1, _needed(len(losses))
        lacks = not self._seen or min(self._seen.values()) < needed
        return age & (age - 1) == 0 and (age < 2**needed or lacks)

    def passed(self, losses: Tensor) -> None:
        """Note that a step of several samples has ended."""
        if len(losses) > 1:
            self._steps += 1
            self._age += 1

    def check(
        self,
        losses: Tensor,
        names: Mapping[int, str],
        backward: Callable[[Tensor, Tensor], Mapping[int, Tensor]],
        *,
        repeats: bool = True,
    ) -> None:
        """Send the losses of half of the samples backward alone, and raise if another sample got a gradient.

        ``backward`` is `Engine.gradients_of`. Without ``repeats``, further backwards must not find which sample gives
        gradients to others: with `fully_shard`, all processes have to run equally many.
        """
        if not repeats and any(node.name() == "CheckpointFunctionBackward" for node in nodes_of([losses])):
            self.give_up("of a checkpoint with use_reentrant=True: use_reentrant=False can be checked")
            return
        chosen = self._half(len(losses))
        try:
            squares = backward(losses, chosen)
        except RuntimeError as error:  # such as that of a loss that writes in place in its backward
            if not repeats:
                raise RuntimeError(
                    'the backward that checks whether samples mix raised: verify="never" leaves it out'
                ) from error
            self.give_up(f"a second backward raised: {error}")
            return
        if hidden := [name for key, name in names.items() if key not in squares]:
            reason = f"{hidden[0]!r} runs in a checkpoint with use_reentrant=True: use_reentrant=False can be checked"
            self.give_up(reason, others=False)
        receivers, seen = _receivers(squares, chosen)
        self._seen.update({name: int(key in seen) for key, name in names.items()})
        if not receivers:
            return
        self._age = self._checks = 0
        givers = chosen.nonzero()[:, 0].tolist()
        for sample in givers if repeats else ():
            only = torch.arange(len(losses), device="cpu") == sample
            found, _ = _receivers(backward(losses, only), only)
            if found:
                givers, receivers = [sample], found
                break
        key, samples = next(iter(receivers.items()))
        raise _mixed(givers, names[key], samples)

    def give_up(self, reason: str, *, others: bool = True) -> None:
        """Warn that it cannot be checked whether samples mix. With ``others``, later steps are not checked either."""
        self._never = self._never or others
        if self.must_check:
            raise RuntimeError(f"it cannot be checked whether samples mix, because {reason}")
        if not self._warned:
            text = f'it is not checked whether samples mix, because {reason}. verify="never" silences this'
            warn_user(text)  # at the line that calls backward(losses)
        self._warned = True

    def _half(self, count: int) -> Tensor:
        """About half of the samples, another half in each check.

        Each sample is in half of the checks, and no other one is in the same checks. So of two samples, each is in a
        check in which the other one is not.
        """
        checks = _needed(count)
        places = torch.arange(2**checks, device="cpu")  # the binary digits say in which checks a sample is
        places = places[sum(places >> i & 1 for i in range(checks)) == checks // 2]
        # the same order until a decision is new, because each check reads another digit of it
        order = torch.randperm(len(places), generator=self._generator.manual_seed(len(self._decisions)), device="cpu")
        half = places[order[:count]] >> self._checks % checks & 1
        self._checks += 1
        return half.bool()


@functools.cache
def _needed(count: int) -> int:
    """The number of checks after which each sample has been sent backward without each other one."""
    return next(checks for checks in itertools.count(1) if math.comb(checks, checks // 2) >= count)


def _mixed(givers: list[int], name: str, samples: list[int]) -> RuntimeError:
    who = f"the loss of sample {givers[0]} changes" if len(givers) == 1 else f"the losses of samples {givers} change"
    shown = ", ".join(map(str, samples[:5])) + (", ..." if len(samples) > 5 else "")
    whose = f"sample{'s' if len(samples) > 1 else ''} {shown}"
    return RuntimeError(
        f"the model or the loss mixes or reorders samples: {who} the gradient of {whose} at {name!r}, so they "
        "are mixed in this layer or later. check_per_sample names the module. If a layer gets an input without samples "
        "and with as many positions as samples, give the input a batch dimension. A loss over all tokens, such as that "
        "of a router of experts, has to be computed for each sample. In a block of rows(), a vector may be of other "
        "rows of the same number: give one for each kind of rows, or leave rows() out. Nothing was changed"
    )


def _receivers(squares: Mapping[int, Tensor], chosen: Tensor) -> tuple[dict[int, list[int]], set[int]]:
    """The samples that were not chosen and got a gradient, by parameter; and the parameters for which this can be told.

    It cannot where no chosen sample has a gradient, as under a dead ReLU, or where others have one that is not finite.
    """
    receivers: dict[int, list[int]] = {}
    tells: set[int] = set()
    for key, row in squares.items():
        row = row.cpu()
        finite, got = row.isfinite(), row != 0
        if found := (finite & got & ~chosen).nonzero()[:, 0].tolist():
            receivers[key] = found
        if (finite & got & chosen).any() and finite[~chosen].all():
            tells.add(key)
    return receivers, tells


def outside_gradients(losses: Tensor, inside: set[int], retained: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that restores the gradients of ``retained`` tensors, and of leaves that are not ``inside``."""
    tensors = [*retained, *(leaf for leaf in leaves_of([losses]) if id(leaf) not in inside)]
    before = [(x, x.grad, None if x.grad is None else x.grad.clone()) for x in tensors]

    def restore() -> None:
        for x, grad, values in before:
            x.grad = grad
            if grad is not None and values is not None:
                grad.copy_(values)

    return restore


def refuse_other_leaves(losses: Tensor, inside: set[int]) -> None:
    """Raise a RuntimeError if the backward of the losses may give a gradient to another leaf than some parameters."""
    for node in nodes_of([losses]):
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in inside and not hasattr(leaf, "refuses"):  # the backward says why
            raise RuntimeError(
                f"a tensor of shape {tuple(leaf.shape)} outside of the module would get a gradient that is not clipped "
                "and has no noise. Put it into the module that the clipper was made for, such as a parent of the model "
                "and its head, or call requires_grad_(False) on it"
            )
        if "CheckpointFunction" in node.name():
            raise RuntimeError(
                "a checkpoint with use_reentrant=True hides its part of the graph: use_reentrant=False can be checked"
            )
