"""Steps that keep the norms of weights."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.kinds import Retraction
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional import foreach
from torchzero_clip.functional.norms import norm, norms_of_each
from torchzero_clip.functional.shards import pack
from torchzero_clip.functional.ways import beyond_float32, may_look
from torchzero_clip.optimizers.weight_decay import WeightDecay
from torchzero_clip.types import NewState, Setting


class Hyperball(Retraction):
    """Takes steps of fixed length on the sphere of weights that have the norm of the first ones.

        v ← w - lr · R · u / ‖u‖
        w ← R · v / ‖v‖

    ``u`` is what the optimizer before it returns, ``‖u‖`` the L2 norm of all elements of a tensor, and ``R`` the norm
    of the weights ``w`` before the first step. The learning rate is the length of a step relative to the norm of the
    weights. It replaces weight decay, which would bring the norms of weights to a value that depends on the learning
    rate.

    It ends the chain: for its parameters only the chain's `LR` may follow. Limit it to the weight matrices of hidden
    layers with `only`. The scale of embeddings, heads and vectors has to be learned.

    **Guarantees.** After a step, the norm of a parameter is R up to rounding, also in half precision, and also under
    FSDP2, where norms are those of whole tensors. A step with a learning rate of 0 leaves all bits as they are.

    Args:
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: In `Modular` for a vector or a parameter of zeros in its scope, for an `LR` or a `WeightDecay`
            before it, and for a transform other than `LR` after it.

    | update | result |
    | --- | --- |
    | norm 0 | the parameter is unchanged |
    | an inf or a NaN | the parameter becomes NaN, unless ``nonfinite=`` of `Modular` says otherwise |

    The state is one number for each parameter, the norm R.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Adam, Hyperball, Modular
        >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = Modular([weight], Adam(lr=0.1), Hyperball())
        >>> weight.grad = torch.tensor([[1.0, -1.0]])
        >>> optimizer.step()
        >>> weight.data, weight.data.norm()
        (tensor([[2.5972, 4.2725]]), tensor(5.0000))

    Source: Wen et al., [Fantastic pretraining optimizers and where to find them II: hyperball
    optimization](https://arxiv.org/abs/2606.16899), 2026.
    """

    each_alone = pure = True

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__({}, name=name)

    @override
    def init_state(self, param: Tensor, setting: Setting) -> NewState:
        return {"radius": norm(param.detach()).to(_wide(param))}

    @override
    def check_parameter(self, name: str, param: Tensor) -> None:
        """Raise for a vector, and for a parameter of zeros if its values can be read at no cost."""
        if param.ndim < 2:
            raise ValueError(
                f"Hyperball keeps the norms of weight matrices, got {name} of shape {tuple(param.shape)}: limit it, "
                "for example Hyperball().only(lambda p: p.ndim >= 2)"
            )
        if type(param.data) is Tensor and may_look(param) and param.numel() and not param.any():
            raise ValueError(
                f"Hyperball keeps the norm of {name}, which is 0, so that it could never change: initialize it before "
                "the optimizer is made, or leave it out with Hyperball().without(...)"
            )

    @override
    def check_chain(self, before: Sequence[Transform], after: Sequence[Transform]) -> None:
        for other in before:
            if isinstance(other, WeightDecay):
                raise ValueError(
                    f"{self!r} keeps the norms of weights, so {other!r} would only turn its steps: leave it out for "
                    "these parameters, and use Adam in place of AdamW"
                )

    @override
    def take_step(self, updates: list[Tensor], step: Step) -> None:
        params, states = step.params, step.states
        if new := [i for i, state in enumerate(states) if not state]:
            for i, radius in zip(new, norms_of_each([params[i] for i in new]).unbind(), strict=True):
                states[i]["radius"] = radius.to(params[i].device, _wide(params[i]))
        radii = pack([state["radius"] for state in states])
        norms = norms_of_each(updates)
        shares = torch.cat([_rates(setting["lr"], span, norms) for setting, span in step.by_setting()])
        is_moved = (norms != 0) & (shares != 0)
        moves = foreach.at_least_float32(updates)
        _scale_(moves, torch.where(is_moved, shares * radii / norms, 0.0))
        moved = foreach.subtract(foreach.at_least_float32(params), moves)
        reached = norms_of_each(moved)
        _scale_(moved, torch.where(is_moved & (reached != 0), radii / reached, 1.0))
        foreach.copy_(params, moved)


def _wide(param: Tensor) -> torch.dtype:
    return foreach.wide_dtype(foreach.reals(param.detach()).dtype)


def _scale_(tensors: list[Tensor], factors: Tensor) -> None:
    foreach.scale_(tensors, factors.unbind(), exact=beyond_float32(factors))


def _rates(lr: float | Tensor, span: slice, norms: Tensor) -> Tensor:
    ones = torch.ones_like(norms.narrow(0, span.start, span.stop - span.start))
    return ones * (lr.to(norms).view(()) if isinstance(lr, Tensor) else lr)
