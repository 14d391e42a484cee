"""Which chain wrote a checkpoint, and how its transforms match those of another chain."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher

from torchzero_clip.core.chain import Composite
from torchzero_clip.core.nodes import Nodes
from torchzero_clip.core.transform import Transform, snake_case
from torchzero_clip.types import Group

IDENTITY = "chain"  # the key of a checkpoint's param groups that says which chain wrote it

FORMAT = 1


@dataclass(frozen=True)
class Member:
    """One transform of the outermost chain, with those inside it."""

    name: str
    kind: str  # the name of its class
    given: str  # the name that the user gave, without the number that made it unique; checkpoints have this key
    structure: Mapping[str, str]  # the arguments that are neither settings nor defaults
    inside: Mapping[str, Sequence[str | Mapping[str, str]]]
    """The kind and the structure of the transforms inside it, by relative path."""
    settings: Mapping[str, str]  # the key of a param group for each setting, by its path without ``name``

    @property
    def likeness(self) -> str:
        """Equal for two transforms that may take each other's settings and state."""
        return json.dumps([self.kind, sorted(self.structure.items()), list(self.inside.items())])

    def __str__(self) -> str:
        arguments = ", ".join(f"{key}={value}" for key, value in self.structure.items())
        inside = ", ".join(f"{path}: {kind}" for path, (kind, _) in self.inside.items())
        return f"{self.name}: {self.kind}({', '.join(filter(None, (inside, arguments)))})"


def members_of(nodes: Nodes) -> list[Member]:
    """The transforms of the outermost chain."""
    members: list[Member] = []
    for outermost in nodes:
        if outermost.outer:
            continue
        prefix = f"{outermost.path}/"
        within = [outermost, *(node for node in nodes if node.path.startswith(prefix))]
        inside = {node.path.removeprefix(prefix): kind_and_structure(node.transform) for node in within[1:]}
        keys = {f"{node.path}/{key}": stored for node in within for key, stored in node.storage_keys.items()}
        settings = {key.removeprefix(prefix): stored for key, stored in keys.items()}
        kind, structure = kind_and_structure(outermost.transform)
        name = outermost.transform.name if outermost.transform.name != snake_case(kind) else ""
        members.append(Member(outermost.path, kind, name, structure, inside, settings))
    return members


def kind_and_structure(transform: Transform) -> tuple[str, dict[str, str]]:
    """The name of the class of a transform, and its arguments that are neither settings, defaults nor transforms."""
    structure = transform.structure()
    if isinstance(transform, Composite):  # each child has the name of the argument that it was
        structure = {key: value for key, value in structure.items() if key not in transform.transforms}
    return type(transform).__name__, structure


def identity_text(members: Iterable[Member]) -> str:
    """The description of a chain, as checkpoints store it."""
    return json.dumps({"format": FORMAT, "chain": [asdict(member) for member in members]})


def read(text: str) -> list[Member]:
    """Parse the description of a chain. Raises ValueError if the text is not one."""
    try:
        content = json.loads(text)
        version = content["format"]
        members = [Member(**entry) for entry in content["chain"]] if version == FORMAT else []
        for member in members:
            _check_types(member)
    except (AttributeError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"{IDENTITY!r} in the param groups of the checkpoint does not describe a chain") from error
    if version != FORMAT:
        raise ValueError(f"the checkpoint has format {version}, and this version of torchzero_clip reads {FORMAT}")
    return members


def _check_types(member: Member) -> None:
    texts = (member.name, member.kind, member.given, *member.structure.values(), *member.settings.values())
    kinds = [kind for kind, _ in member.inside.values()]
    if not all(isinstance(text, str) for text in (*texts, *kinds)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{member} has values that are no text")


def saved_members(groups: Sequence[Group]) -> list[Member]:
    """The chain of a checkpoint, which all its param groups name."""
    texts = [group.get(IDENTITY) for group in groups]
    if None in texts:
        raise ValueError(
            "the checkpoint does not say which chain wrote it. One of an optimizer of torch is loaded by "
            "load_state_dict(from_torch_optim(state_dict, optimizer))"
        )
    if any(text != texts[0] for text in texts):
        raise ValueError("the param groups of the checkpoint come from different chains")
    return read(str(texts[0]))


def matched(
    saved: Sequence[Member], current: Sequence[Member], new: Iterable[str], dropped: Iterable[str]
) -> list[tuple[Member, Member]]:
    """Pairs of a saved transform and its successor. Raises if transforms that are not ``new`` or ``dropped`` differ."""
    without, added = _names("dropped", dropped, saved, "the saved chain"), _names("new", new, current, "this chain")
    predecessors = [member for member in saved if member.name not in without]
    successors = [member for member in current if member.name not in added]
    if not _fit(predecessors, successors):
        raise ValueError(_difference(saved, current))
    return list(zip(predecessors, successors, strict=True))


def _names(argument: str, names: object, members: Sequence[Member], where: str) -> list[object]:
    listed: list[object] = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names]
    of_chain = [member.name for member in members]
    for name in listed:
        if name not in of_chain:
            there = ", ".join(of_chain)
            raise ValueError(f"{argument} must name transforms of {where}, got {name!r}; they are {there}")
    return listed


def _fit(saved: Sequence[Member], current: Sequence[Member]) -> bool:
    """True if two chains are alike, and changed names leave no doubt about which transform is which."""
    if [a.likeness for a in saved] != [b.likeness for b in current]:
        return False
    renamed = [(a, b) for a, b in zip(saved, current, strict=True) if a.given != b.given]
    ours, theirs = ({member.given for member in members} - {""} for members in (current, saved))
    went_elsewhere = any(a.given in ours or b.given in theirs for a, b in renamed)
    return len({a.likeness for a, _ in renamed}) == len(renamed) and not went_elsewhere


def _difference(saved: Sequence[Member], current: Sequence[Member]) -> str:
    """The message that names the difference between two chains, and the call that resolves it."""
    theirs, ours = ([m.likeness + m.given for m in members] for members in (saved, current))
    blocks = SequenceMatcher(None, theirs, ours, autojunk=False).get_matching_blocks()
    kept = {block.a + k: block.b + k for block in blocks for k in range(block.size)}
    dropped = [i for i in range(len(saved)) if i not in kept]
    new = [i for i in range(len(current)) if i not in kept.values()]
    named = [("new", [current[i].name for i in new]), ("dropped", [saved[i].name for i in dropped])]
    call = ", ".join(f"{argument}={names!r}" for argument, names in named if names)
    message = (
        f"the checkpoint belongs to another chain. It was written by [{'; '.join(map(str, saved))}], and this chain is "
        f"[{'; '.join(map(str, current))}]. "
    )
    if _fit(saved, current):
        return f"{message}They match without new and dropped"
    message += f"To keep what matches and start the rest fresh, pass {call} to load_state_dict, or to before_step"
    for members, likenesses, left, state in ((current, ours, new, "new"), (saved, theirs, dropped, "gone")):
        for i in left:
            alike = [m.name for m, likeness in zip(members, likenesses, strict=True) if likeness == likenesses[i]]
            if len(alike) > 1:
                return f"{message}. But {' and '.join(alike)} have the same structure: name the one that is {state}"
    return message
