"""Public docstrings say what the signatures say, and show an example that runs (the doctests are part of the run)."""

import builtins
import inspect
import re
import tokenize
from pathlib import Path

import pytest

import torchzero_clip

NAMED = {name: getattr(torchzero_clip, name) for name in dir(torchzero_clip) if not name.startswith("_")}
PUBLIC = {name: obj for name, obj in NAMED.items() if callable(obj)}
METHODS = {
    f"{name}.{key}": method
    for name, obj in PUBLIC.items()
    if inspect.isclass(obj)
    for key, method in vars(obj).items()
    if inspect.isfunction(method) and not key.startswith("_")
}
PACKAGE = Path(torchzero_clip.__file__).parent
OF_OTHERS = {
    *("fully_shard", "OneCycleLR", "CyclicLR", "GradScaler", "LBFGS", "SummaryWriter", "native_batch_norm_backward"),
    *("use_experts_implementation", "max_grad_norm_ratio", "num_workers", "clip_norm_by_ema", "clip_norm_2"),
    *("LEVELS", "groupby", "skip_file_prefixes"),
}
"""Names in docstrings and comments that do not occur in the code of the package."""


def section(doc, title):
    """The lines of a Google-style section, dedented."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)*)", doc + "\n", re.MULTILINE)
    return inspect.cleandoc(found[1]) if found else ""


def documented_arguments(doc):
    return re.findall(r"^\*{0,2}(\w+):", section(doc, "Args"), re.MULTILINE)


def signature_arguments(obj):
    return [name for name in inspect.signature(obj).parameters if name != "self"]


def written_source(obj):
    """The source of a function or constructor; nothing for one that Python made itself."""
    if inspect.isclass(obj):
        obj = obj.__init__
    made = not inspect.isfunction(obj) or obj.__code__.co_filename == "<string>"
    return "" if made else inspect.getsource(obj)


@pytest.mark.parametrize("name", PUBLIC)
def test_args_match_the_signature(name):
    assert documented_arguments(inspect.getdoc(PUBLIC[name])) == signature_arguments(PUBLIC[name])


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_list_args_list_those_of_the_signature(name):
    doc = inspect.getdoc(METHODS[name])
    assert doc
    assert len(doc.split("\n")[0]) < 120
    if "Args:" in doc:
        assert set(documented_arguments(doc)) <= set(signature_arguments(METHODS[name]))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    assert ">>>" in section(inspect.getdoc(PUBLIC[name]), "Examples")


@pytest.mark.parametrize("name", PUBLIC)
def test_raised_errors_are_documented(name):
    doc = section(inspect.getdoc(PUBLIC[name]), "Raises")
    source = written_source(PUBLIC[name])
    for error in set(re.findall(r"raise (\w+)\(", source)):
        assert error in doc


def tokens_of(path):
    with tokenize.open(path) as file:
        return list(tokenize.generate_tokens(file.readline))


def test_names_in_docstrings_and_comments_exist():
    tokens = {path: tokens_of(path) for path in PACKAGE.rglob("*.py")}
    is_prose = {tokenize.STRING: '"""', tokenize.COMMENT: "#"}
    known, used, prose = {*dir(builtins), *OF_OTHERS}, set(), []
    for path, found in tokens.items():
        for token in found:
            if token.type == tokenize.NAME:
                known.add(token.string)
            elif token.string.startswith(is_prose.get(token.type, "\0")):
                prose += [(path, token.start[0], token.string)]
            elif token.type == tokenize.STRING:  # keys of param groups and of records
                known.update(re.findall(r"\w+", token.string))
    wrong = []
    for path, line, text in prose:
        names = re.findall(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)", text) + re.findall(r"``([a-z_]\w*)``", text)
        for name in names:
            last = name.rpartition(".")[2]
            used.add(last)
            if last not in known and not name.startswith("torch.") and not (path.parent / name).exists():
                wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {name}")
    assert not wrong
    assert used >= OF_OTHERS
