"""Decides which per-sample gradients are stored."""

from typing import Literal, TypeAlias

Memory: TypeAlias = Literal["auto", "low"]


class MemoryBudget:
    """Lets per-sample gradients replace the tensors that they are computed from, if that takes no more memory.

    It counts over all layers of one backward: a later layer may use the memory that an earlier one has saved.

    Args:
        memory: With "low", it never does.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory: Memory = memory
        self._saved = 0

    def reserve(self, formed: int, made_of: int) -> bool:
        """Reserve memory for per-sample gradients. Return False if it does not suffice, or if the batch is empty.

        Args:
            formed: The bytes of the per-sample gradients.
            made_of: The bytes of the inputs and output gradients that are stored otherwise.
        """
        saved = self._saved + made_of - formed
        if self._memory == "low" or not formed or saved < 0:
            return False
        self._saved = saved
        return True
