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


def recipe_id(page):
    return page.stem


def shown(text):
    """A text without its numbers and without times, and the numbers."""
    text = re.sub(r"'train_(runtime|samples_per_second|steps_per_second)': '[\d.]+', ", "", text)
    numbers = [float(number.replace(",", "")) for number in NUMBER.findall(text)]
    return NUMBER.sub("#", re.sub(" +", " ", re.sub(" +\n", "\n", text))), numbers


@pytest.mark.parametrize("page", PAGES, ids=recipe_id)
def test_a_page_shows_the_program_of_its_name_and_its_output(page):
    included = re.findall(r'^--8<-- "(.*)"$', page.read_text(), re.MULTILINE)
    assert included == [f"docs/recipes/{page.stem}.txt", f"examples/{page.stem}.py"]
    assert all((ROOT / path).exists() for path in included)


@pytest.mark.parametrize("page", PAGES, ids=recipe_id)
def test_a_page_links_to_its_program_for_readers_of_the_repository(page):
    """They see the lines that include it."""
    text = page.read_text()
    for path in (f"{page.stem}.txt", f"../../examples/{page.stem}.py"):
        assert f"]({path})" in text
        assert (page.parent / path).exists()


def test_every_recipe_is_in_the_table_and_in_the_navigation():
    table, navigation = ((ROOT / name).read_text() for name in ("docs/recipes.md", "mkdocs.yml"))
    for page in PAGES:
        assert f"(recipes/{page.name})" in table
        assert f": recipes/{page.name}\n" in navigation
    assert {path.stem for path in RECIPES.glob("*.txt")} == {page.stem for page in PAGES}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.peers] * (page.stem in NEEDS)) for page in PAGES],
)
def test_a_program_prints_what_its_page_shows(page):
    for package in NEEDS.get(page.stem, "").split():
        pytest.importorskip(package, reason=f"{package} is not installed")
    run = run_script_of_processes if page.stem == "accelerate_fsdp2" else run_script
    words, numbers = shown(run(ROOT / "examples" / f"{page.stem}.py"))
    expected_words, expected = shown((RECIPES / f"{page.stem}.txt").read_text())
    assert words == expected_words
    assert numbers == pytest.approx(expected, rel=TOLERANCE.get(page.stem, 0.2), abs=0.003, nan_ok=True)


def test_numbers_are_told_from_words():
    assert shown("a  1,234.5 b nan 86.1%") == ("a # b # #%", [1234.5, pytest.approx(float("nan"), nan_ok=True), 86.1])
