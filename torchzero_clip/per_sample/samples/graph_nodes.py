"""Which functions of a graph may give rows to other samples by the values of tensors that they save.

A function that saves only numbers, such as a transposition, does what these numbers say, and they are in the hash of
the graph. A function that saves tensors of floats, such as a product, does not move rows either: a backward with NaN
shows where it could let a gradient pass. Every other function *moves* rows, unless it is listed here, and so does every
unknown one.

torch exports no classes of its functions in C++, so they are told apart by their names. What a function has saved is in
its attributes ``_saved_...``, which torch documents.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.parallel.distributed import _DDPSink as DDPSink  # torch has no public name for it

from torchzero_clip.compat import is_in_checkpoint
from torchzero_clip.per_sample.arguments import counts_up
from torchzero_clip.per_sample.samples.call import call_of

Axes = Sequence[int] | None
"""The dimensions of the output of a function along which values move rows; None if it may be any."""

Movement = Sequence[int] | Literal["nowhere", "anywhere"]
"""Where rows may be moved: along some dimensions of an output, nowhere, or anywhere."""

_FLOATS = """
A L LU Q R S U Vh attn_bias b batch1 batch2 bias buffer cx eigenvalues eigenvectors exponent g grad_out grad_output grid
hidden_bias hidden_gates hx i1 i2 i3 imag input input1 input2 input3 input_bias input_gates inverse key log_probs
end log_sumexp logsumexp mat mat1 mat2 max mean min noise other output params query real result running_mean
running_var rstd save_invstd save_mean save_var scale self self_or_result sign softmax_logsumexp solution tau tensor
tensor1 tensor2 v value values vec vec1 vec2 weight weight0 weight1 weight2 weight3 x1 x2 zero_point
"""
_OF_LOSSES = "is_target target targets total_weight pos_weight"
_SEEDS = "philox_offset philox_seed rng_state unused"
_SAFE_ARGUMENTS = frozenset(f"{_FLOATS} {_OF_LOSSES} {_SEEDS}".split())
"""Names of saved tensors that move no rows: floats, the targets of losses, and random seeds."""

_OF_BATCHES = """
Convolution CtcLoss CudnnBatchNorm CudnnRnn FusedDropout FusedRmsNorm LogSigmoid LstmMps MaskedFill MaskedSoftmax
MiopenBatchNorm MiopenRnn MkldnnRnnLayer MultilabelMarginLoss NativeBatchNorm NativeBatchNormLegit
NativeBatchNormLegitNoTraining NativeDropout NativeGroupNorm NativeLayerNorm NllLoss NllLoss2D Rrelu RreluWithNoise
ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention ScaledDotProductFlashAttention
ScaledDotProductFlashAttentionForCpu ScaledDotProductFusedAttentionOverrideable StdMean ThnnFusedGruCell
ThnnFusedLstmCell VarMean
"""
_FIXED = frozenset(_OF_BATCHES.split())
"""Functions that save other tensors, but leave each row in its place: masks, statistics, and workspaces."""

_CHOICES = frozenset({"Clamp", "ClampMax", "ClampMin", "Fmax", "Fmin", "Maximum", "Minimum", "Where"})
"""Functions that choose between two arguments by values. With one gradient, they are masks."""

_IN_2D = "AdaptiveMaxPool2D FractionalMaxPool2D GridSampler2D MaxPool2DWithIndices MaxUnpool2D"
_POOLING = {name.replace("2D", f"{dims}D"): dims for dims in (2, 3) for name in _IN_2D.split()}
"""Functions that move entries along their last dimensions only, and how many these are."""

_BY_EQUALITY = frozenset({"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0", "RenormBackward0"})
"""Functions of floats that move rows by the values of floats. NaN would not show it."""

_IDENTITIES = BackwardHookFunction, DDPSink
"""Functions of torch in Python that leave rows where they are.

Other functions in Python count as moving rows anywhere, unless they declare ``keeps_rows``. Each step with such a
function is proved, which is slower but never wrong.
"""

_SIZES = "_info", "_output_size", "_scalar_type", "_numel", "_options", "_p", "_eps"
"""The ends of names of saved sizes and floats."""

_MAY_BE_SPARSE = {
    "Mm": ("self", "mat2"),
    "Addmm": ("mat1", "mat2"),
    "Bmm": ("self", "mat2"),
    "Baddbmm": ("batch1", "batch2"),
    "Mv": ("self",),
    "Addmv": ("mat",),
    "TriangularSolve": ("A",),
}
"""The matrices of functions. NaN does not pass the zeros of a sparse one, so a proof may miss rows that it moves."""
_PLAIN = frozenset({"AccumulateGrad", "CopyBackwards"})  # which save nothing


@dataclass(frozen=True)
class NodeKind:
    """What functions of one kind have in common."""

    name: str
    numbers: Sequence[str] = ()
    """The attributes that go into the hash: all numbers that are saved, except sizes and floats."""
    views: bool = False
    """Whether the sizes of the output decide where rows go."""
    moves_anywhere: Callable[[Node], bool] | None = None
    """Whether a function of this kind moves rows to any place. None if it does not."""
    axes: Callable[[Node], Axes] | None = None
    """The dimensions of the output along which it moves rows. None if there are none."""
    inputs: Callable[[Node], Sequence[int]] | None = None
    """The dimensions of the input along which it moves rows. None if there are none."""
    saves: bool = False
    """Whether it saves tensors, so that values may keep a gradient from passing."""
    reads: Sequence[str] = ()
    """The saved tensors that `moves_anywhere`, or without it `axes`, reads."""

    def moves(self, node: Node, *, can_read: bool) -> Movement:
        """Where a function of this kind moves rows: nowhere, anywhere, or along some dimensions of its output.

        If what it has saved cannot be read, it may be anywhere. A product moves rows along its `axes` then: these are
        known without the matrices, and a proof finds out whether the samples are in them.
        """
        if can_read and self.moves_anywhere is not None:
            return "anywhere" if self.moves_anywhere(node) else "nowhere"
        is_known = can_read or self.moves_anywhere is not None
        axes = self.axes(node) if is_known and self.axes is not None else None
        return "anywhere" if axes is None or not len(shape_of(node)) else axes

    def can_read(self, node: Node) -> bool:
        """True unless a checkpoint would run again for what `reads` has."""
        found = [getattr(node, f"_raw_saved_{name}") for name in self.reads]
        each = [saved for raw in found for saved in (raw if isinstance(raw, tuple) else (raw,))]
        return not any(map(is_in_checkpoint, each))


NODE_KINDS: dict[type[Node], NodeKind] = {}
"""The kinds that were seen. Those of classes that users or the compiler make are in `_python_kinds`, which is slower
and does not keep the classes alive."""
_python_kinds: WeakKeyDictionary[type, NodeKind] = WeakKeyDictionary()
_compiled = itertools.count()  # all compiled functions have one name


def kind_of(node: Node) -> NodeKind:
    """The kind of a node that is not in `NODE_KINDS` yet."""
    if isinstance(node, BackwardCFunction):
        made_by: Any = node._forward_cls  # pyright: ignore  # the `torch.autograd.Function`; torch has no public name
        found = _python_kinds.get(type(node))
        if found is None:
            found = _of_python(node, made_by)
            lives_on = made_by in _IDENTITIES or made_by.__module__.startswith("torchzero_clip.")
            (NODE_KINDS if lives_on else _python_kinds)[type(node)] = found
        return found
    found = NODE_KINDS[type(node)] = _of_torch(node)
    return found


def _of_torch(node: Node) -> NodeKind:
    cls, name = type(node), type(node).__name__
    names = [attribute for attribute in dir(cls) if attribute.startswith("_saved_")]
    # torch has an attribute _raw_saved_... beside _saved_... for tensors only
    tensors = {attribute for attribute in names if hasattr(cls, f"_raw{attribute}")}
    numbers = tuple(attribute for attribute in names if attribute not in tensors and not _is_size(attribute))
    kind = partial(NodeKind, name, numbers, "_saved_self_sym_sizes" in names, saves=bool(tensors))
    function = name.partition("Backward")[0]
    if name in _PLAIN or function in _FIXED:
        return kind()
    # functions of extensions in C++ share a class, whose name is not theirs
    is_unknown = name != node.name() or name == "CopySlices"
    if is_unknown or name in _BY_EQUALITY or "Sparse" in name or "Nested" in name:
        return kind(moves_anywhere=_always)
    if function in _CHOICES:
        return kind(moves_anywhere=_has_two_gradients)
    if function in _MAY_BE_SPARSE:
        matrices = _MAY_BE_SPARSE[function]
        axes = _axes_of_product if len(matrices) > 1 else None
        return kind(moves_anywhere=partial(_is_sparse, matrices), axes=axes, reads=matrices)
    if function in _POOLING:
        count = _POOLING[function]
        return kind(axes=partial(_last, count), inputs=lambda _: range(-count, 0))
    if _SAFE_ARGUMENTS.issuperset(attribute.removeprefix("_saved_") for attribute in tensors):
        return kind()
    if name in ("IndexBackward0", "IndexPutBackward0", "UnsafeIndexBackward0"):
        return kind(axes=partial(_indexed, puts="Put" in name), inputs=_indexed_of_input, reads=("indices",))
    if name in ("EmbeddingBackward0", "EmbeddingBagBackward0"):
        return kind(moves_anywhere=_is_no_parameter)
    if isinstance(getattr(node, "_saved_dim", None), int):
        return kind(axes=_along, inputs=_along_of_input)
    return kind(moves_anywhere=_always)


def _is_size(attribute: str) -> bool:
    return "_sym_" in attribute or attribute.endswith(_SIZES)


def _of_python(node: Any, made_by: Any) -> NodeKind:
    name = type(node).__name__
    if made_by in _IDENTITIES or getattr(made_by, "keeps_rows", False) or _is_of_shards(made_by):
        return NodeKind(name)
    if hasattr(node, "symints") and name == "CompiledFunctionBackward":
        return NodeKind(f"{name} {next(_compiled)}", ("symints",), moves_anywhere=_saves_integers, reads=("tensors",))
    return NodeKind(name, moves_anywhere=_always)


def _is_of_shards(made_by: Any) -> bool:
    """True for the identity that `fully_shard` puts behind a module, which torch has under no public name."""
    return made_by.__name__ == "RegisterPostBackwardFunction" and made_by.__module__.startswith("torch.distributed")


def _always(node: Node) -> bool:
    return True


def _has_two_gradients(node: Node) -> bool:
    return sum(following is not None for following, _ in node.next_functions) > 1


def _is_sparse(matrices: Sequence[str], node: Node) -> bool:
    saved = [getattr(node, f"_saved_{name}") for name in matrices]
    return any(isinstance(x, Tensor) and x.layout != torch.strided for x in saved)


def _axes_of_product(node: Node) -> Axes:
    """The dimensions along which a product with a sparse matrix moves rows, found without reading the matrix.

    It is the left matrix, which moves rows of the right one, or the right matrix, which moves columns of the left one.
    """
    (left, _), (right, _) = node.next_functions[-2:]
    ndim = len(shape_of(node))
    return [*([ndim - 2] if right is not None else []), *([ndim - 1] if left is not None else [])]


def _saves_integers(node: Any) -> bool:
    """True if a compiled function saves integers or booleans, which may be indices or masks."""
    return any(isinstance(x, Tensor) and not x.is_floating_point() for x in node.saved_tensors)


def _is_no_parameter(node: Node) -> bool:
    """True unless an embedding takes rows of a parameter, or of the copies of one that the clipper has made."""
    following: Any = node.next_functions[0][0]
    while following is not None and len(following.next_functions) == 1 and call_of(following) is None:
        following = following.next_functions[0][0]
    call = call_of(following)
    return not (getattr(following, "variable", None) is not None or (call is not None and call.copies))


def _last(count: int, node: Node) -> Axes:
    ndim = len(shape_of(node))
    return range(ndim - count, ndim)


def _along(node: Any) -> Axes:
    """The saved dimension of the output. After a reduction, the output has only the other dimensions."""
    reduced = getattr(node, "_saved_keepdim", True) is False and hasattr(node, "_saved_self_sym_sizes")
    return () if reduced else [dim % max(len(shape_of(node)), 1) for dim in _along_of_input(node)]


def _along_of_input(node: Any) -> Sequence[int]:
    """The saved dimension of the input, which is negative if it counts from the end."""
    # torch returns negative numbers as unsigned ones
    return (node._saved_dim - 2**64 if node._saved_dim >= 2**63 else node._saved_dim,)


def _indexed_of_input(node: Any) -> Sequence[int]:
    """The dimensions that tensors index. Entry i of an index 0, 1, 2, ... stays in row i."""
    dims: list[int] = []
    for i, index in enumerate(node._saved_indices):
        if index is not None and not (index.ndim == 1 and i == 0 and counts_up(index)):
            dims += range(i, i + index.ndim) if _is_mask(index) else [i]
    return dims


def _indexed(node: Any, *, puts: bool) -> Axes:
    """The dimensions that tensors index, in the output; with ``puts``, in the tensor that is written into."""
    ndim, indices = len(shape_of(node)), node._saved_indices
    places = [i for i, index in enumerate(indices) if index is not None]
    chosen = [indices[i] for i in places]
    if any(map(_is_mask, chosen)):
        if len(chosen) > 1:
            return None
        return range(places[0], places[0] + (chosen[0].ndim if puts else 1))
    if puts:
        return places
    depth = max(index.ndim for index in chosen)
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    if first == places[0] == 0 and depth == 1 and counts_up(chosen[0]):
        return range(1, ndim)  # as in ``x[torch.arange(B), last]``, where row i of the output is of row i
    return range(first, first + depth)


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def shape_of(node: Node) -> Sequence[int]:
    """The shape of the first output of a function in the forward, for which torch has no public name."""
    return node._input_metadata[0].shape
