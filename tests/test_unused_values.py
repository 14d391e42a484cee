"""`only`, `without` and `set_param_groups` return a new transform: a statement that drops it does nothing."""

import ast
import doctest
import re
from pathlib import Path
from textwrap import dedent, indent

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("torchzero_clip", "tests", "docs", "examples", "benchmarks")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
CALL = re.compile(r"\.(only|without|set_param_groups)\(")
FENCED = re.compile(r"^( *)```py(?:thon)?\b[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def in_page(text):
    """The dropped calls in the Python blocks of a page."""
    blocks = [dedent(block) for _, block in FENCED.findall(text)]
    return [call for block in blocks for call in (in_doctests if block.startswith(">>>") else in_program)(block)]


def in_doctests(text):
    """The dropped calls of examples. If an example has an output, this shows the result or an error."""
    examples = doctest.DocTestParser().get_examples(text)
    return [call for example in examples if not example.want for call in in_program(example.source)]


def in_program(text):
    """The dropped calls of a program, of its docstrings, and of programs in its strings."""
    nodes = list(ast.walk(ast.parse(text)))
    withs = [node for node in nodes if isinstance(node, ast.With)]
    raising = [node.body[-1] for node in withs if any("raises(" in ast.unparse(item) for item in node.items)]
    found = []
    for node in nodes:
        if isinstance(node, ast.Expr) and node not in raising:
            found += map(ast.unparse, dropped(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and CALL.search(node.value):
            found += in_string(node.value)
    return found


def in_string(text):
    """The dropped calls of a docstring, or of a string with a program of several lines."""
    if ">>>" in text:
        return in_doctests(text)
    try:
        return in_program(dedent(text)) if "\n" in text else []
    except SyntaxError:  # a sentence
        return []


def dropped(value):
    """The calls whose results are the value of an expression."""
    match value:
        case ast.Call(func=ast.Attribute(attr="only" | "without" | "set_param_groups")):
            return [value]
        case ast.IfExp(body=first, orelse=second):
            return [*dropped(first), *dropped(second)]
        case ast.BoolOp(values=[*_, end]) | ast.ListComp(elt=end):
            return dropped(end)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [call for part in parts for call in dropped(part)]
    return []


def test_every_new_transform_is_used():
    found = {}
    for path in [*ROOT.glob("*.md"), *FILES]:
        text = path.read_text()
        if CALL.search(text) and path != Path(__file__):
            found[str(path.relative_to(ROOT))] = in_page(text) if path.suffix == ".md" else in_program(text)
    assert "docs/chain.md" in found
    assert "torchzero_clip/core/transform.py" in found
    assert {file: calls for file, calls in found.items() if calls} == {}


DROPPED = "clip.only('a')"
FUNCTION = f'def test():\n    """One line."""\n    clip = ClipNorm(1)\n    {DROPPED}\n    return clip'


@pytest.mark.parametrize(
    "program",
    [
        DROPPED,
        f"for clip in clips:\n    {DROPPED}",
        f"{DROPPED} if scoped else None",
        f"scoped and {DROPPED}",
        f"[{DROPPED} for clip in clips]",
        f"x, {DROPPED}",
        f"with pytest.raises(ValueError):\n    {DROPPED}\n    step()",
        f"with torch.no_grad():\n    {DROPPED}",
        FUNCTION,
        f'SCRIPT = """\n{FUNCTION.replace(chr(34), chr(39))}\n"""',
        f'"""Says what.\n\n    >>> clip = ClipNorm(1)\n    >>> {DROPPED}\n    >>> clip\n    ClipNorm(1)\n"""',
    ],
)
def test_a_dropped_transform_is_found(program):
    assert in_program(program) == [DROPPED]
    assert in_page(f"Text.\n\n```python\n{program}\n```\n") == [DROPPED]
    assert in_page("- In a list:\n\n" + indent(f"```py notest\n{program}\n```\n", "  ")) == [DROPPED]


def test_a_doctest_of_a_page_is_read():
    assert in_page(f"```python\n>>> {DROPPED}\n>>> clip\nClipNorm(1)\n>>> {DROPPED}\nClipNorm(1)\n```\n") == [DROPPED]


@pytest.mark.parametrize(
    "call", ["clip.without('a')", "clip.set_param_groups([{'params': p}])", "clip.only('a').without('b')"]
)
def test_each_method_is_found(call):
    assert in_program(f"clip = ClipNorm(1)\n{call}") == [call]


@pytest.mark.parametrize(
    "program",
    [
        f"clip = {DROPPED}",
        f"return_({DROPPED})",
        f"chains = [lambda: {DROPPED}, {DROPPED}]",
        f"def scoped(clip):\n    return {DROPPED} if scoped else clip",
        f"with pytest.raises(ValueError, match='a'):\n    {DROPPED}",
        f"{DROPPED}.check_groups([])",
        f"MESSAGE = '''write\n{DROPPED} in the chain'''",
        f'assert repr(clip) == "{DROPPED}"',
        f'"""Says what.\n\n    >>> {DROPPED}\n    ClipNorm(1).only("a")\n"""',
    ],
)
def test_a_transform_that_is_used_is_not_found(program):
    assert in_program(program) == []
    assert in_page(f"Text: {DROPPED}\n\n```python\n{program}\n```\n\n```text\n{DROPPED}\n```\n") == []
