"""An object that sees the steps of an optimizer, and changes nothing."""

from abc import ABC, abstractmethod

from torchzero_clip.engine.walk import Walk


class Attached(ABC):
    """An object with hooks of an optimizer that is not a `Modular`. `before_step` takes over its listener."""

    listener: "Listener"


class Listener(ABC):
    """Sees every step of a `Modular`. It must not change what it sees."""

    @abstractmethod
    def begin(self, step: Walk) -> None:
        """Called before the first transform of a step that is taken."""

    @abstractmethod
    def end(self, step: Walk) -> None:
        """Called at the end of every step, also of one that was refused, raised an error, or had no gradients.

        ``step.judged.before`` are the L2 norms of the gradients before the first transform, if there were any.
        """
