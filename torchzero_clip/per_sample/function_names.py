"""What the names of functions of torch say of them.

`__torch_function__` receives each function that is called with a row. One operation comes as a function of torch, as a
method, as an operator and as an attribute: different objects, which have only parts of their names in common. A
function with another name runs for each sample, and its output is compared with that of the batch.
"""

_ARITHMETIC = {"add", "sub", "mul", "div", "truediv"}
_IN_PLACE = {"iadd", "isub", "imul", "idiv", "itruediv"}
OF_DTYPE = {"to", "type_as"}
"""Functions that read only the dtype and the device of their second argument."""
EXPANSIONS = {"expand", "expand_as", "broadcast_to", "repeat"}
"""Functions that may make an entry for each sample."""
HOOKS = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}
"""Functions that give a tensor a hook, which would see a gradient that is summed over samples."""


def is_arithmetic(name: str) -> bool:
    """True for names of functions such as addition, in which a row may be expanded."""
    return name.strip("_").removeprefix("r") in _ARITHMETIC


def is_in_place(name: str) -> bool:
    """True for the names of functions that change their first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or name.strip("_") in _IN_PLACE
    return name.endswith("_") and name != "requires_grad_"
