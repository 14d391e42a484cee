"""What the graph of autograd leads to."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node


def leaves_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The leaves to which a backward of some tensors would pass gradients."""
    for node in nodes_of(tensors):
        leaf = getattr(node, "variable", None)
        # functions of users may have an attribute of that name
        if isinstance(leaf, Tensor) and not node.next_functions:
            yield leaf


def nodes_of(tensors: Iterable[Tensor]) -> Iterator[Node]:
    """The nodes through which a backward of some tensors would go."""
    seen: set[Node] = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    nodes = [*seen]
    while nodes:
        node = nodes.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def outside_gradients(losses: Tensor, inside: set[int], retained: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that restores the gradients of ``retained`` tensors, and of leaves that are not ``inside``."""
    tensors = [*retained, *(leaf for leaf in leaves_of([losses]) if id(leaf) not in inside)]
    before = [(x, x.grad, None if x.grad is None else x.grad.clone()) for x in tensors]

    def restore() -> None:
        for x, grad, values in before:
            x.grad = grad
            if grad is not None and values is not None:
                grad.copy_(values)

    return restore
