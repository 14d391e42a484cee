"""The pages of the recipes show their programs and what these print."""

import re
from pathlib import Path

import pytest
from ranks import run_script

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


def table(text):
    """The numbers of each row, by its label."""
    rows = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    return {
        label: [float(field.split()[-1].rstrip("%")) for field in fields]
        for label, *fields in rows
        if fields and NUMBER.fullmatch(fields[0].rstrip("%"))
    }


def claims_of_muon_clip(rows):
    """QK-Clip keeps the logits small, and the model is right about as often."""
    (*free, right), (*held, right_if_held) = rows["Muon and AdamW"], rows["with QKClip(10)"]
    assert free[-1] > 50
    assert max(held) < 20
    assert right_if_held > right - 10


def claims_of_gan(rows):
    """The generator finds the centers with and without a limit."""
    assert len(rows) == 2
    for good, centers, _ in rows.values():
        assert good > 20
        assert centers >= 6


def claims_of_ppo(rows):
    """All three agents learn to balance the pole, and the gradients of the value function are far above the limit."""
    assert len(rows) == 3
    for first, _, _, last, *norms in rows.values():
        assert last > 2 * first
        assert all(norm > 10 * 0.5 for norm in norms)


def claims_of_warm_up_the_limit(rows):
    """Both runs with a growing limit end near the best fixed limit, and far below the two between which it grows."""
    small, large, best, by_function, by_scheduler = (loss for (loss,) in rows.values())
    for growing in (by_function, by_scheduler):
        assert growing < min(0.2 * small, 0.5 * large)
        assert growing < 2 * best


CLAIMS = {
    "gan": claims_of_gan,
    "muon_clip": claims_of_muon_clip,
    "ppo": claims_of_ppo,
    "warm_up_the_limit": claims_of_warm_up_the_limit,
}
"""Checks of programs that amplify rounding. On another processor, they print other numbers."""


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
    printed, page = run_script(ROOT / "examples" / f"{name}.py"), (RECIPES / f"{name}.txt").read_text()
    (words, numbers), (expected_words, expected) = shown(printed), shown(page)
    assert words == expected_words
    if name in CLAIMS:
        CLAIMS[name](table(printed))
    else:
        assert numbers == pytest.approx(expected, rel=0.2, abs=0.003, nan_ok=True)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_page_has_numbers_that_show_its_claims(name):
    CLAIMS[name](table((RECIPES / f"{name}.txt").read_text()))


def test_numbers_are_told_from_words():
    assert shown("a  1,234.5 b nan 86.1%") == ("a # b # #%", [1234.5, pytest.approx(float("nan"), nan_ok=True), 86.1])
