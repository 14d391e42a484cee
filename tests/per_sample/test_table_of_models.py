"""The table of models in the docs is what the tests of the models find."""

import copy
from pathlib import Path

import pytest
import torch
from per_sample.zoo import ENTRIES

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper

PAGE = Path(__file__).parents[2] / "docs" / "per_sample.md"
BEGIN, END = "<!-- the table of models, which a test compares -->\n", "<!-- end of the table of models -->"


def by_table(entry):
    """The modules that the table of the package runs whole."""
    return PerSampleGradientClipper(copy.deepcopy(entry.model()), ConstantFlatClipper(1.0), whole=entry.whole).whole


def line(name, entry):
    model = entry.model()
    given = [item if isinstance(item, str) else item.__name__ for item in entry.whole]
    kinds = sorted(
        {type(model.get_submodule(path)).__name__ for path, why in by_table(entry).items() if why != "whole="}
    )
    whole = f"right with `whole=({given[0]},)`, refused without" if given else "right"
    whole = f"right; the table of the package runs `{kinds[0]}` whole" if kinds else whole
    return f"| {name} | {whole} |"


def groups():
    lines = {name: line(name, entry) for name, entry in ENTRIES.items()}
    plain = [name for name, text in lines.items() if text.endswith("| right |")]
    rows = [f"| {', '.join(plain)} | right |", *(text for name, text in lines.items() if name not in plain)]
    return "\n".join(["| model | result |", "| --- | --- |", *rows]) + "\n"


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_the_table_in_the_docs_is_what_is_found():
    pytest.importorskip("transformers")
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == groups().strip()


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.whole])
def test_models_that_need_whole_are_refused_with_the_line_to_write(name):
    torch.manual_seed(0)
    entry = ENTRIES[name]
    model = entry.model()
    refused = pytest.raises((ValueError, RuntimeError), match=rf"whole=\({entry.whole[0].__name__},\)")
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper, refused:
        clipper.backward(entry.losses(model, entry.batch()))
