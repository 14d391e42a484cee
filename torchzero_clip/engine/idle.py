"""A warning after many steps in a row without gradients, or with gradients of 0."""

from torchzero_clip.compat import never_compiled, warn_user
from torchzero_clip.engine.walk import Walk

_IN_A_ROW = 20
EVERY = 32  # planned steps compute the norm of all tensors only once in so many steps, to save time

_ABSENT = (
    f"no parameter had a gradient in the last {_IN_A_ROW} steps, so the steps did nothing. Call backward() "
    "after zero_grad() and before step(), with a loss that depends on the parameters of this optimizer"
)
_ZERO = (
    f"all gradients were 0 in the last {_IN_A_ROW} steps. The loss may not depend on these parameters, or gradients "
    "are set to 0 between backward() and step(). Gradients of float16 may underflow to 0 without a gradient scaler"
)


class Idle:
    """Counts the steps in a row without gradients, or with gradients of 0, and warns once."""

    # steps with usual gradients do not call it: a gap in ``steps_taken`` shows that there were some

    def __init__(self) -> None:
        self._in_a_row, self._reason, self._at = 0, "", -1
        self._has_warned = False

    @never_compiled
    def not_taken(self, walk: Walk, steps_taken: int) -> None:
        """Note a step that was refused, or that had no gradients."""
        if walk.refused_by:
            self._in_a_row = 0
        # without gradients here, another process may have some
        elif walk.company is None or walk.company.group is None:
            params = (param for group in walk.table.groups for param in group["params"])
            self._count(_ABSENT, steps_taken, is_usual=not any(param.requires_grad for param in params))

    @never_compiled
    def zeros(self, steps_taken: int, *, is_taken: bool = True) -> None:
        """Note a step whose gradients were 0, and whether it counts as taken."""
        self._count(_ZERO, steps_taken, is_taken=is_taken)

    def is_due(self, steps_taken: int) -> bool:
        """True if a planned step should read its norm."""
        return not steps_taken % EVERY or self._at == steps_taken - 1

    def _count(self, reason: str, steps_taken: int, *, is_taken: bool = False, is_usual: bool = False) -> None:
        is_next = reason == self._reason and steps_taken == self._at + is_taken
        self._in_a_row, self._reason, self._at = self._in_a_row + 1 if is_next else 1, reason, steps_taken
        if self._in_a_row >= _IN_A_ROW and not (self._has_warned or is_usual):
            self._has_warned = True
            warn_user(reason)
