"""Buffers of a model that change while gradients wait for a release: they are part of the model, without noise."""

from torch import Tensor, nn

from torchzero_clip.per_sample.hooks import Hook


class Buffers:
    """Notices changes of buffers between the first forward after a release and the next release.

    Integers of one element are excepted: they count steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handle = model.register_forward_pre_hook(Hook(self._forward_began))
        self.note()

    def note(self) -> None:
        """Begin anew."""
        self._known = self._found()
        self._is_fresh = True

    def remove(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def changed(self) -> str | None:
        """The name of a buffer that has changed, was added or was removed."""
        found = self._found()
        for name in self._known | found:
            (old, before), (new, after) = self._known.get(name, (None, -1)), found.get(name, (None, -1))
            if old is not new or before != after:
                return name
        return None

    def _forward_began(self, *_: object) -> None:
        if self._is_fresh:  # what the user has changed before, such as by load_state_dict, does not count
            self._known = self._found()
        self._is_fresh = False

    def _found(self) -> dict[str, tuple[Tensor | None, int]]:
        """The buffers with their version, which each change in place raises."""
        return {
            name: (buffer, 0 if buffer.is_inference() else buffer._version)
            for name, buffer in watched(self._model).items()
        }


def watched(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that must not change, by name."""
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.numel() != 1 or buffer.is_floating_point() or buffer.is_complex()
    }
