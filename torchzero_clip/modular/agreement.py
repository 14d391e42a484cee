"""Compares the chains of the processes of a group, which have to exchange equally many numbers in each step."""

import json
from collections.abc import Sequence
from itertools import zip_longest

import torch.distributed as dist
from torch.distributed import ProcessGroup

from torchzero_clip.checkpoints.identity import kind_and_structure
from torchzero_clip.core.kinds import Gate
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.scope import NamedParam
from torchzero_clip.engine.nonfinite import StepPolicy
from torchzero_clip.functional.processes import device_of, gathered_texts
from torchzero_clip.modular.validation import idle_names


def agree(
    nodes: Nodes, policy: StepPolicy, params: Sequence[NamedParam], has_schedules: bool, group: ProcessGroup | None
) -> tuple[dict[str, bool], bool]:
    """The warning about each pattern, with True if it is idle on all processes; and if any process has schedules."""
    # all processes of a group call this together, and all raise if their chains would not exchange the same numbers
    idle = idle_names(nodes, params)
    if group is None:
        return idle, has_schedules
    # the arguments and transforms that decide which numbers a step exchanges, one line for each
    arguments = [f"nonfinite={policy.nonfinite!r}", f"max_consecutive_skips={policy.max_consecutive_skips}"]
    said = json.dumps([[*arguments, *map(_line, nodes)], idle, has_schedules])
    device = device_of([param for param, *_ in params], group)
    rows = [json.loads(text) for text in gathered_texts(said, group, device)]
    _compare([lines for lines, _, _ in rows], dist.get_process_group_ranks(group))
    everywhere = {text: all(theirs.get(text, True) for _, theirs, _ in rows) for text in idle}
    return everywhere, any(has_schedules for *_, has_schedules in rows)


def _line(node: Node) -> str:
    transform = node.transform
    kind, structure = kind_and_structure(transform)
    arguments = ", ".join(f"{key}={value}" for key, value in structure.items())
    scope = " with a scope" if transform.scope.limited else ""
    loss = " that judges the loss" if isinstance(transform, Gate) and transform.needs_loss else ""
    return f"{node.path}: {kind}({arguments}){scope}{loss}"


def _compare(described: Sequence[Sequence[str]], ranks: Sequence[int]) -> None:
    for lines, rank in zip(described, ranks, strict=True):
        for first, own in zip_longest(described[0], lines, fillvalue="no transform"):
            if first != own:
                raise ValueError(
                    "all processes of process_group need the same chain, nonfinite and max_consecutive_skips: "
                    f"process {rank} has {own} where process {ranks[0]} has {first}. Only settings and the patterns of "
                    "scopes may differ"
                )
