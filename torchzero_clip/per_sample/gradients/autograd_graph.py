"""What the graph of autograd leads to."""

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node


def leaves_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The leaves to which a backward of some tensors would pass gradients."""
    for node in nodes_of(tensors):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf


def nodes_of(tensors: Iterable[Tensor]) -> Iterator[Node]:
    """The nodes through which a backward of some tensors would go."""
    nodes: list[Node] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
