"""What the graph of autograd leads to."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def leaves_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The leaves to which a backward of some tensors would pass gradients."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        for following, _ in () if node is None else node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
