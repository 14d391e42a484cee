"""What the names of functions of torch say of them.

A tensor subclass gets the functions that it is given to. One operation comes as a function of torch, as a method, as an
operator and as an attribute: different objects, which have only parts of their names in common. A name that is not
here has no rule of its own: its function runs for each sample, and is compared with that of the batch.
"""

_ARITHMETIC = {"add", "sub", "mul", "div", "truediv"}
_IN_PLACE = {"iadd", "isub", "imul", "idiv", "itruediv"}
OF_DTYPE = {"to", "type_as"}
EXPANSIONS = {"expand", "expand_as", "broadcast_to", "repeat"}
TRANSPOSED = {"T", "mT", "H", "mH", "real", "imag"}
HOOKS = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}


def is_arithmetic(name: str) -> bool:
    """True for names of functions such as addition, in which a row may be expanded."""
    return name.strip("_").removeprefix("r") in _ARITHMETIC


def is_in_place(name: str) -> bool:
    """True for the names of functions that change their first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or name.strip("_") in _IN_PLACE
    return name.endswith("_") and name != "requires_grad_"
