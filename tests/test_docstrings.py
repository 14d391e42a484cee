"""Public docstrings say what the signatures say, and show an example that runs (the doctests are part of the run)."""

import inspect
import re

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
