"""A layer of a model as errors name it, with the way out that they give."""

from collections.abc import Collection

from torch import nn
from typing_extensions import override

from torchzero_clip.per_sample.whole import whole_hint


class Layer:
    """A module in a model, by its name, which is empty for the model itself.

    ``reruns`` has the names of layers that a function of the model has run in a backward.
    """

    def __init__(self, name: str, module: nn.Module, model: nn.Module, reruns: Collection[str]) -> None:
        self.name, self.module = name, module
        self._model, self._reruns = model, reruns

    @override
    def __str__(self) -> str:
        return layer_text(self.name, self.module)

    @property
    def whole_hint(self) -> str:
        """A way out of an error: the argument that runs a module around the layer whole. Empty if there is none."""
        return whole_hint(self._model, self.name, self._reruns)

    @property
    def way_out(self) -> str:
        """The end of an error after another way out."""
        return f". Or {hint}" if (hint := self.whole_hint) else ""

    def unknown_rows(self, why: str, *, how: str = "") -> ValueError:
        """The error for rows whose samples are not known."""
        how = how or (
            "Use backward(losses), or say which sample each row belongs to, with `with clipper.rows(sample_of_row, "
            "batch_size=B):` around the forward"
        )
        return ValueError(f"{self} got rows whose samples are not known: {why}. {how}{self.way_out}")


def layer_text(name: str, module: nn.Module) -> str:
    """A module in a message: its name in the model, if it has one, and its class."""
    return f"{name!r} ({type(module).__name__})" if name else type(module).__name__


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of a module, by name."""
    return {name: param for name, param in module.named_parameters() if param.requires_grad}
