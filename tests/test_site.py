"""What `docs/hooks.py` adds to the pages: addresses, typeset formulas, tables and pictures on narrow screens."""

import importlib.util
import inspect
import pkgutil
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

import torchzero_clip

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WIDEST = 92  # characters of code that a page shows at 1280 pixels without scrolling
pytest.importorskip("latex2mathml", reason="the docs extra is not installed")


def load_hooks():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load_hooks()


def test_addresses_that_are_not_known_are_left_out():
    config = SimpleNamespace()
    hooks.set_addresses(config, {"branch": "main"})
    assert vars(config) == {}


def test_pages_take_the_addresses_of_the_file():
    config = SimpleNamespace()
    known = {"repository": "https://code.example/some/one", "documentation": "https://pages.example/one", "branch": "x"}
    hooks.set_addresses(config, known)
    assert vars(config) == {
        "site_url": "https://pages.example/one/",
        "repo_url": "https://code.example/some/one/",
        "repo_name": "some/one",
        "edit_uri": "edit/x/docs/",
    }


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[`a.py`](../../examples/a.py)", "`a.py`"),
        ("[the page](../faq.md)", "[the page](../faq.md)"),
        ("[a](a.txt)", "[a](a.txt)"),
    ],
)
def test_a_link_to_a_file_outside_of_the_pages_becomes_its_words(link, shown):
    assert hooks.with_outside_links(link, "recipes/a.md", {"branch": "x"}) == shown


def test_a_link_to_a_file_outside_of_the_pages_leads_to_the_repository():
    known = {"repository": "https://code.example/some/one", "branch": "x"}
    expected = "See [the changes](https://code.example/some/one/blob/x/CHANGELOG.md)."
    assert hooks.with_outside_links("See [the changes](../CHANGELOG.md).", "changelog.md", known) == expected


def test_a_recipe_has_no_table_of_contents():
    for folder, hidden in (("recipes", {"hide": ["toc"]}), ("transforms", {})):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=f"{folder}/a.md"), meta={})
        assert hooks.on_page_markdown("text", page) == "text"
        assert page.meta == hidden


def test_bars_are_as_long_as_the_numbers():
    table = "<table><tr><th>a</th></tr><tr><td>x</td><td>0.50</td><td>2.0</td></tr></table>"
    found = re.findall(r'<td class="bar" style="--share: (.*?); --one: (.*?)">(.*?)</td>', hooks.with_bars(table))
    assert found == []
    found = re.findall(
        r'<td class="bar" style="--share: (.*?); --one: (.*?)">(.*?)</td>', hooks.with_bars(f"<!-- bars -->\n{table}")
    )
    assert found == [("25.0%", "50.0%", "0.50"), ("100.0%", "50.0%", "2.0")]


def docstrings():
    """Of all modules' classes and functions."""
    for info in pkgutil.walk_packages(torchzero_clip.__path__, "torchzero_clip."):
        source = Path(importlib.util.find_spec(info.name).origin).read_text()
        yield from re.findall(r'"""(.*?)"""', source, re.DOTALL)


def formula_blocks():
    """The indented blocks of docstrings that contain a formula."""
    for doc in docstrings():
        for block in re.findall(
            r"(?:^|\n\n)((?: {4,}[^\n]+\n)+(?:\n(?: {4,}[^\n]+\n)+)*)", inspect.cleandoc(doc) + "\n"
        ):
            if re.search("←|‖|√|Σ", block) and not re.search(r"^    \w+: |>>>", block, re.MULTILINE):
                yield hooks.normalized(block)


def test_every_formula_is_typeset_and_every_entry_is_used():
    blocks = set(formula_blocks())
    entries = set(hooks.formulas())
    assert len(blocks) > 25
    assert blocks - entries == set(), "add them to docs/formulas.toml"
    places = [*map(inspect.cleandoc, docstrings()), *(page.read_text() for page in PAGES)]
    text = hooks.normalized("\n".join(places))
    assert [entry for entry in entries if entry not in text] == [], "no docstring and no page has these"


def math_text(latex):
    """What a reader sees of the MathML of one formula."""
    found = []
    parser = HTMLParser()
    parser.handle_data = found.append
    parser.feed(hooks.typeset(latex))
    return "".join(found)


@pytest.mark.parametrize(
    ("latex", "seen"),
    [
        (r"u \leftarrow u \cdot \frac{max_norm}{\lVert u \rVert}", "u←u·max_norm‖u‖"),
        (r"m_i = \min(1, l2_norm_clip)", "mi=min(1,l2_norm_clip)"),
        (r"\sum_i c_i \cdot g_i", "∑ici·gi"),
        (r"\text{joint norm} % a remark", "joint\xa0norm a remark"),
        ("% only a remark, `x > 1`", " only a remark, x > 1"),
    ],
)
def test_words_of_formulas_are_set_upright(latex, seen):
    assert math_text(latex) == seen
    assert "\\" not in hooks.typeset(latex)


def test_no_command_of_latex_is_left_in_a_formula():
    assert [latex for latex in hooks.formulas().values() if "\\" in math_text(latex)] == []


def test_a_block_becomes_a_formula():
    page = '<div class="highlight"><pre><span></span><code>u ← u   - mean(u)\n</code></pre></div>'
    assert "<math" in hooks.with_formulas(page)
    other = page.replace("mean", "median")
    assert hooks.with_formulas(other) == other


def test_rows_of_a_table_with_sentences_name_their_columns():
    long = "a sentence that a narrow column would break into many lines"
    table = (
        "<table>\n<thead>\n<tr>\n<th>what</th>\n<th><code>a</code> &lt; b</th>\n</tr>\n</thead>\n"
        f'<tbody>\n<tr>\n<td>x</td>\n<td style="text-align: right;">{long}</td>\n</tr>\n</tbody>\n</table>'
    )
    marked = hooks.with_narrow_tables(table)
    assert '<table data-narrow="rows">' in marked
    assert '<td data-label="what">x</td>' in marked
    assert 'data-label="a &lt; b" style' in marked
    numbers = table.replace(long, "1.02")
    assert hooks.with_narrow_tables(numbers) == numbers
    with_long_heading = numbers.replace("<code>a</code> &lt; b", long)
    assert f'<td data-label="{long}"' in hooks.with_narrow_tables(with_long_heading)


def test_a_picture_opens_in_full():
    picture = '<p><img alt="Norms" src="img/limit.png" /></p>'
    opened = '<p><a class="picture" href="img/limit.png"><img alt="Norms" src="img/limit.png" /></a></p>'
    assert hooks.with_open_pictures(picture) == opened


def test_narrow_screens_show_a_narrow_picture_or_all_of_a_small_one():
    for name, start in (
        ("norms", '<a class="picture fits" href="../img/norms.png"><picture><source'),
        ("clip_norm", '<a class="picture fits"'),
    ):
        assert hooks.with_open_pictures(f'<img src="../img/{name}.png">').startswith(start)
    assert 'srcset="../img/norms_narrow.png"' in hooks.with_open_pictures('<img src="../img/norms.png">')


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_pages_is_not_cut(page):
    blocks = re.findall(r"^```(?:python|py)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.split("\n") if len(line) > WIDEST] == []


def test_every_page_is_in_the_navigation_once():
    yaml = pytest.importorskip("yaml", reason="the docs extra is not installed")

    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for value in (entry.values() if isinstance(entry, dict) else entry) for page in pages(value)]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = pages(config["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)
    assert [next(iter(entry)) for entry in config["nav"]] == [
        "Use",
        "Transforms",
        "Per-sample",
        "Distributed",
        "Extend",
        "Reference",
    ]


def test_the_theme_loads_nothing_from_a_foreign_host():
    yaml = pytest.importorskip("yaml", reason="the docs extra is not installed")
    theme = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]
    assert theme["font"] is False
    overridden = [
        *(DOCS / "overrides").rglob("*.html"),
        *(DOCS / "stylesheets").iterdir(),
        *(DOCS / "img").glob("*.svg"),
    ]
    loads = r"https?://(?!www\.w3\.org/2000/svg)|@import|data-md-component=\"source\""
    assert [path.name for path in overridden if re.search(loads, path.read_text())] == []


def test_addresses_are_read_from_the_file():
    config = SimpleNamespace()
    hooks.on_config(config)
    addresses = tomllib.loads((ROOT / "addresses.toml").read_text())
    assert hasattr(config, "site_url") == ("documentation" in addresses)
    assert hasattr(config, "repo_url") == ("repository" in addresses)


def test_the_home_page_is_the_beginning_of_the_readme():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"), meta={})
    home = hooks.on_page_markdown("text", page)
    assert home.startswith("# torchzero_clip\n")
    assert home.replace("](", "](docs/") == (ROOT / "README.md").read_text().partition("\n## Try it\n")[0]


def split_rows(text):
    """The lines of tables that do not begin and end a row."""
    found, in_table = [], False
    for line in re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
        in_table = (in_table or line.startswith("| ")) and bool(line.strip())
        if in_table and not (line.startswith("|") and line.endswith("|")):
            found.append(line)
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_of_tables_are_on_one_line(page):
    assert split_rows(page.read_text()) == []


def test_a_row_on_two_lines_is_found():
    assert split_rows("| a | b |\n| --- | --- |\n| one | two\nthree |\n\ntext") == ["| one | two", "three |"]
    assert split_rows("| a | b |\n| --- | --- |\n| one | two |\n\ntext | more") == []


@pytest.mark.parametrize("searched", ["attention mask", "NaN loss", "GAN", "two optimizers", "decay only matrices"])
def test_a_search_finds_a_question_with_an_answer(searched):
    """The search weighs headings most."""
    parts = re.split(r"^## (.*)$", (DOCS / "faq.md").read_text(), flags=re.MULTILINE)
    words = [rf"(?i:\b{word}\b)" if word.islower() else rf"\b{word}\b" for word in searched.split()]
    sections = zip(parts[1::2], parts[2::2], strict=True)
    answers = [body for head, body in sections if all(re.search(word, head) for word in words)]
    assert len(answers) == 1
    assert len(answers[0].split()) > 10


def test_programs_that_read_find_all_pages_in_one_file():
    nav = [{"Use": [{"Home": "index.md"}, {"Recipes": [{"GAN": "recipes/gan.md"}]}]}]
    assert hooks.llms(nav, "https://pages.example/").splitlines()[2:] == [
        "> See, clip or skip PyTorch gradients before `optimizer.step()`, with the optimizer you already have.",
        "",
        "## Use",
        "",
        "- [torchzero_clip](https://pages.example/): See, clip or skip PyTorch gradients before `optimizer.step()`,"
        " with the optimizer you already have",
        "- [GAN](https://pages.example/recipes/gan/): Give each network its own optimizer and its own limit",
    ]


@pytest.mark.parametrize(
    ("searched", "page"),
    [("gradient clipping", "transforms/clip_norm"), ("grad norm", "recorder"), ("adapts", "adaptive")],
)
def test_a_search_finds_a_page_by_its_title(searched, page):
    """The search weighs titles most, so no other title may have all of the words."""
    titles = {path: path.read_text().partition("\n")[0] for path in PAGES}
    found = [path for path, title in titles.items() if set(searched.split()) <= set(re.findall(r"\w+", title))]
    assert found == [DOCS / f"{page}.md"]
