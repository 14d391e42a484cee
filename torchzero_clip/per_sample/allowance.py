"""Which gradients of single samples are kept in memory."""

from typing import Literal, TypeAlias

Memory: TypeAlias = Literal["auto", "low"]


class Allowance:
    """Lets gradients of samples take the place of what they are made of, as long as that takes no more memory.

    It looks at all layers of one backward together: what one of them saves, a later one may spend.

    Args:
        memory: "low" grants none.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory: Memory = memory
        self._saved = 0

    def grants(self, formed: int, made_of: int) -> bool:
        """Whether gradients are kept; of no samples there are none.

        Args:
            formed: The bytes that they take.
            made_of: The bytes of inputs and output gradients, which are kept otherwise.
        """
        saved = self._saved + made_of - formed
        if self._memory == "low" or not formed or saved < 0:
            return False
        self._saved = saved
        return True
