"""The module that an optimizer was built for, which may get other parameters later."""

import weakref
from collections.abc import Iterable

from torch import nn

from torchzero_clip.compat import warn_user
from torchzero_clip.functional.lists import params_of
from torchzero_clip.types import Group


class Origin:
    """The module whose parameters an optimizer was given."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self._has_warned = False
        self.calls = 0  # since the optimizer was built or has loaded a checkpoint

    def warn_of_lost(self, groups: Iterable[Group]) -> None:
        """Warn once of parameters that have a gradient and are in no group. Only calls 1, 2, 4, 8, ... look."""
        module, self.calls = self.module(), self.calls + 1
        if module is None or self._has_warned or self.calls & (self.calls - 1):
            return
        params = params_of(groups)
        if any(param.is_meta for param in params):  # the step raises, and says why
            return
        held = set(map(id, params))
        named = [(n, p) for n, p in module.named_parameters() if p.grad is not None and p.requires_grad]
        lost = [name for name, param in named if id(param) not in held]
        if lost:
            self._has_warned = True
            others = f" and of {len(lost) - 1} more parameters" if len(lost) > 1 else ""
            warn_user(
                f"the module has a gradient of {lost[0]!r}{others}, which this optimizer does not have, so its "
                "steps do not change them. Build the optimizer after calls that replace parameters, such as "
                "fully_shard and load_state_dict(assign=True), and pass parameters of a new layer to add_param_group"
            )
