"""The errors of proofs, each with a way out: samples mix, or the backward cannot prove that they do not."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from torchzero_clip.per_sample.layer import Layer


def mixed(layer: Layer, givers: Sequence[int]) -> RuntimeError:
    """The error for a row that gets gradients from the losses of several samples, as far as these are known."""
    shown = ", ".join(map(str, givers[:5])) + (", ..." if len(givers) > 5 else "")
    who = f"the losses of samples {shown} change" if len(givers) > 1 else "several losses change"
    what = f"mixes samples: {who} the gradient of one row of {layer}, so they are mixed"
    if len(givers) == 1:
        what = (
            "mixes samples, or a function or hook has a backward that is not linear: the gradient of sample "
            f"{shown} is not proportional to its loss at {layer},"
        )
    way_out = layer.whole_hint and f". If a module around it mixes no samples, {layer.whole_hint}"
    return RuntimeError(
        f"the model or the loss {what} in this layer or later. A loss over all tokens, such as that of a router of "
        "experts, has to be computed for each sample. If all samples share the rows, such as positions, give them a "
        "first dimension of size 1: x[None]. If the samples are in another dimension, "
        f"declare batch_first. Nothing was changed{way_out}"
    )


def is_of_donated_buffers(reason: Exception | str) -> bool:
    """True for the error of a compiled function that frees what it has saved. torch has no class for this error."""
    return "donated buffers" in str(reason)


def not_repeatable(reason: Exception | str) -> RuntimeError:
    """The error for a graph that cannot run backward twice."""
    how = "Use a loss that does not write into what its backward reads, and keep the graph"
    if is_of_donated_buffers(reason):
        how = "Set torch._functorch.config.donated_buffer = False before the forward"
    return RuntimeError(
        "it cannot be checked whether samples mix, because the graph cannot run backward twice "
        f"({reason}). {how}. Nothing was changed"
    )


@contextmanager
def repeating() -> Generator[None]:
    """A block for further backwards of a graph: an error says that the graph cannot run twice, unless memory lacks."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a loss that frees its memory, for example
        raise not_repeatable(error) from error


def reentrant() -> RuntimeError:
    """The error for a checkpoint that hides its part of the graph."""
    return RuntimeError(
        "it cannot be checked whether samples mix, because a checkpoint with use_reentrant=True hides its part of the "
        "graph. Call torch.utils.checkpoint with use_reentrant=False; for a model of transformers, "
        'gradient_checkpointing_enable({"use_reentrant": False}). Nothing was changed'
    )


def runs_in_backward(layer: Layer) -> RuntimeError:
    """The error for a layer that first runs in a backward."""
    return RuntimeError(
        f"{layer} first runs in the backward of a function, where samples cannot be told apart: use "
        f"torch.utils.checkpoint with use_reentrant=False{layer.way_out}"
    )


def elsewhere(layer: Layer, dim: int) -> RuntimeError:
    """The error for losses that are not those of the samples in an argument of the model."""
    return RuntimeError(
        f"the model or the loss mixes samples: losses[i] is not the loss of one sample in dimension {dim} of the input "
        f"of {layer}. Average over the other dimensions, or declare batch_first. Nothing was changed"
    )


def rows_moved(layer: Layer) -> RuntimeError:
    """The error for rows that belong to other samples, in a graph in which they were proved to stay."""
    return RuntimeError(
        f"rows of {layer} belong to other samples than in earlier steps with the same graph, such as after a hook that "
        'reorders gradients: use verify="always", which proves each step. Nothing was changed'
    )


def too_small(layer: Layer, why: str = "") -> RuntimeError:
    """The error for rows without a pattern whose gradients have no ratio."""
    return RuntimeError(
        f"{layer} got rows whose samples are not known, because some of their gradients are not finite, too large or "
        f"too small{why and f'. {why}'}: scale the losses, or leave out samples whose loss is not finite, and run "
        f"forward and backward again{layer.way_out}. Nothing was changed"
    )


def gated(layer: Layer) -> RuntimeError:
    """The error for values of other samples behind a gate, in private training."""
    return RuntimeError(
        f"values of other samples may be in the gradients of {layer} or of a later layer, behind a gate or a mask that "
        "lets no gradient pass in this step. In private training this is refused: put one document in each row, and "
        f"compute nothing from several samples{layer.way_out}. Nothing was changed"
    )
