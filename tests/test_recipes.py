"""The pages of the recipes show their programs and what these print."""

import re
from pathlib import Path

import pytest
from ranks import run_script, run_script_of_processes

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "docs" / "recipes"
PAGES = sorted(RECIPES.glob("*.md"))
NEEDS = {
    "accelerate_fsdp2": "accelerate",
    "accelerate_loop": "accelerate",
    "centralization": "sklearn",
    "freeze_and_unfreeze": "sklearn",
    "huggingface_trainer": "transformers accelerate",
    "lightning_trainer": "lightning",
    "lora": "peft sklearn",
    "muon_clip": "sklearn",
}
TOLERANCE = {"muon_clip": 0.7, "ppo": 0.5, "warm_up_the_limit": 0.7}
"""Runs that amplify rounding, which differs between processors: two pages were written on an Intel Xeon, and an AMD
EPYC prints other numbers with every version of the package."""
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?|nan")


PROGRAMS = sorted(path.stem for path in RECIPES.glob("*.txt"))


def recipe_id(page):
    return page.stem


def included(page):
    """The files that a page shows."""
    return re.findall(r'^--8<-- "(.*)"$', page.read_text(), re.MULTILINE)


def shown(text):
    """A text without its numbers and without times, and the numbers."""
    text = re.sub(r"'train_(runtime|samples_per_second|steps_per_second)': '[\d.]+', ", "", text)
    numbers = [float(number.replace(",", "")) for number in NUMBER.findall(text)]
    return NUMBER.sub("#", re.sub(" +", " ", re.sub(" +\n", "\n", text))), numbers


def test_each_program_is_on_one_page_after_its_output():
    shown = [path for page in PAGES for path in included(page)]
    assert sorted(shown[::2]) == [f"docs/recipes/{name}.txt" for name in PROGRAMS]
    assert shown[1::2] == [f"examples/{Path(output).stem}.py" for output in shown[::2]]
    assert all(included(page) for page in PAGES)
    assert all((ROOT / path).exists() for path in shown)


@pytest.mark.parametrize("page", PAGES, ids=recipe_id)
def test_a_page_links_to_its_programs_for_readers_of_the_repository(page):
    """They see the lines that include them."""
    for path in included(page):
        assert f"]({'../../' * path.startswith('examples')}{path.removeprefix('docs/recipes/')})" in page.read_text()


def test_every_recipe_is_in_the_table_and_in_the_navigation():
    table, navigation = ((ROOT / name).read_text() for name in ("docs/recipes.md", "mkdocs.yml"))
    for page in PAGES:
        assert f"(recipes/{page.name})" in table
        assert f": recipes/{page.name}\n" in navigation


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.peers] * (name in NEEDS)) for name in PROGRAMS],
)
def test_a_program_prints_what_its_page_shows(name):
    for package in NEEDS.get(name, "").split():
        pytest.importorskip(package, reason=f"{package} is not installed")
    run = run_script_of_processes if name == "accelerate_fsdp2" else run_script
    words, numbers = shown(run(ROOT / "examples" / f"{name}.py"))
    expected_words, expected = shown((RECIPES / f"{name}.txt").read_text())
    assert words == expected_words
    assert numbers == pytest.approx(expected, rel=TOLERANCE.get(name, 0.2), abs=0.003, nan_ok=True)


def test_numbers_are_told_from_words():
    assert shown("a  1,234.5 b nan 86.1%") == ("a # b # #%", [1234.5, pytest.approx(float("nan"), nan_ok=True), 86.1])
