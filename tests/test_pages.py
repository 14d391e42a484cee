"""The pages render as they are meant, their Python blocks run, and the index of the API lists every public name."""

import ast
import inspect
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import torchzero_clip
from torchzero_clip import integrations

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WITH_README = [ROOT / "README.md", *PAGES]

LONGEST = 60  # characters of a statement that can be read inside a sentence
FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*(.*?)\s*$")
LANGUAGE = re.compile(r"[a-z][a-z0-9+-]*")


def page_id(page):
    return str(page.relative_to(ROOT))


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("page", [page for page in WITH_README if blocks(page)], ids=page_id)
def test_blocks_run(page, tmp_path, monkeypatch):
    """Page by page, with a model at hand."""
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    names = {"model": model, "torch": torch}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", WITH_README, ids=page_id)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def render(text):
    """The HTML of a page, by the extensions of mkdocs.yml."""
    yaml = pytest.importorskip("yaml", reason="the docs extra is not installed")
    markdown = pytest.importorskip("markdown", reason="the docs extra is not installed")
    pytest.importorskip("pymdownx", reason="the docs extra is not installed")
    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["markdown_extensions"]
    options = {name: given for entry in entries if isinstance(entry, dict) for name, given in entry.items()}
    names = [name for entry in entries for name in (entry if isinstance(entry, dict) else [entry])]
    return markdown.markdown(text, extensions=names, extension_configs=options)


class Rendered(HTMLParser):
    """The text of a page outside of code, and its inline code."""

    def __init__(self, html):
        super().__init__()
        self.text, self.inline, self._open = "", [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag in ("pre", "code"):
            self._open.append(tag)
            if self._open == ["code"]:
                self.inline.append("")

    def handle_endtag(self, tag):
        if tag in ("pre", "code"):
            self._open.remove(tag)

    def handle_data(self, data):
        if not self._open:
            self.text += data
        elif self._open == ["code"]:
            self.inline[-1] += data


def is_statement(code):
    """True for Python that a sentence cannot hold: several statements, one with a body, or a long one."""
    try:
        statements = ast.parse(code).body
    except SyntaxError:
        return False
    if len(statements) != 1 or isinstance(statements[0], ast.Expr):
        return len(statements) > 1
    return hasattr(statements[0], "body") or len(code) > LONGEST


def badly_rendered(text):
    """What of a page does not render as code, and should."""
    page = Rendered(render(text))
    found = ["a fence in the text"] if re.search("```|~~~", page.text) else []
    found += [f"inline code of several lines: {code!r}" for code in page.inline if "\n" in code]
    return found + [f"a statement as inline code: {code!r}" for code in page.inline if is_statement(code)]


def without_language(text):
    """The first lines of fenced blocks that do not name a language, and nothing else, and of those that never end."""
    found, opened = [], None
    for line in text.splitlines():
        match = FENCE.match(line)
        if match is None:
            continue
        fence, info = match.groups()
        if opened is None:
            opened = fence
            if not LANGUAGE.fullmatch(info):
                found.append(line.strip())
        elif fence.startswith(opened) and not info:
            opened = None
    return found if opened is None else [*found, "a block that does not end"]


@pytest.mark.parametrize("page", WITH_README, ids=page_id)
def test_code_renders_as_code(page):
    assert badly_rendered(page.read_text()) == []


@pytest.mark.parametrize("page", [*WITH_README, ROOT / "CONTRIBUTING.md"], ids=page_id)
def test_fenced_blocks_name_a_language(page):
    assert without_language(page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("```python notest\nfully_shard(model)\n```", "inline code of several lines"),
        ("```python\nx = 1\n\nText", "a fence in the text"),
        ("Some ```python code", "a fence in the text"),
        ("Call `optimizer.step()\noptimizer.zero_grad()`.", "inline code of several lines"),
        ("Write `for x in y: step(x)` there.", "a statement as inline code"),
        ("Write `a = 1; b = 2` there.", "a statement as inline code"),
        ("Set `optimizer.param_groups[0]['max_norm'] = schedule_of_the_limit(epoch, steps)`.", "a statement as inline"),
    ],
)
def test_the_check_of_pages_finds(text, mistake):
    assert any(found.startswith(mistake) for found in badly_rendered(text))


def test_the_check_of_pages_accepts_blocks_and_short_inline_code():
    text = "# Title\n\n```python\nimport torch\nx = '```'\n```\n\n`x = 1`, `import torch`, `pip install torch`\n"
    assert badly_rendered(text) == []
    assert without_language(text) == []


@pytest.mark.parametrize(
    "text",
    ["```\nx = 1\n```", "```python notest\nx = 1\n```", "* item\n\n    ~~~\n    x\n    ~~~", "```python\nx = 1\n"],
)
def test_the_check_of_languages_finds(text):
    assert len(without_language(text)) == 1


ROW = re.compile(r"^\| \[(\w+)\]\(([\w/]+\.md)#([\w.]+)\) \| (.+) \|$", re.MULTILINE)


def index_rows():
    return ROW.findall((DOCS / "api.md").read_text())


def public_names():
    """The names that `torchzero_clip` and its modules `integrations` and `private` export."""
    own = [name for name, _ in inspect.getmembers(integrations, inspect.isfunction)]
    # it is read, because its import needs the extra
    nodes = ast.parse(Path(torchzero_clip.__file__).with_name("private.py").read_text()).body
    own += [alias.asname for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname]
    own += [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    return sorted([*torchzero_clip.__all__, *integrations.CALLBACKS, *(name for name in own if name[0] != "_")])


def test_the_index_lists_every_public_name_once():
    assert sorted(name for name, *_ in index_rows()) == public_names()


def test_the_index_links_to_the_page_that_documents_the_name():
    for name, path, anchor, _ in index_rows():
        assert anchor.rpartition(".")[2] == name
        assert re.search(rf"^::: {re.escape(anchor)}$", (DOCS / path).read_text(), re.MULTILINE), anchor


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "transform_reference.md"], ids=page_id)
def test_pages_for_users_choose_the_members_of_classes(page):
    """Otherwise a page also lists the methods that the optimizer calls."""
    blocks = re.findall(r"^::: torchzero_clip\.([\w.]+)\n((?:    .*\n)*)", page.read_text(), re.MULTILINE)
    classes = {name: options for name, options in blocks if name.rpartition(".")[2][0].isupper()}
    assert [name for name, options in classes.items() if "members:" not in options] == []


QUOTED = {
    "2.87": ("quickstart.md", "no clipping"),
    "2.16": ("quickstart.md", 'ClipNorm(1, dim="global")    '),
    "3.40": ("loss_spiked.md", "without a clip"),
    "1.75": ("loss_spiked.md", "with the limit"),
    "0.54": ("performance.md", '| `ClipNorm(1, dim="global"), AdamW()` |'),
    "0.85": ("performance.md", '| `ClipNorm(1, dim="global"), AdamW()` |'),
}
"""The results that the README quotes, and the row of a table, made by a program, that has them."""


def test_the_readme_quotes_results_from_tables():
    prose = re.sub(r"```.*?```|`[^`]*`|(Python|torch) \d\.\d+", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert set(re.findall(r"\d+\.\d+", prose)) == set(QUOTED)
    for quoted, (page, start) in QUOTED.items():
        row = next(line for line in (DOCS / page).read_text().splitlines() if line.lstrip().startswith(start))
        results = re.findall(r"\d+\.\d+", row.removeprefix(start))
        assert quoted in [f"{float(result):.2f}" for result in results], page


def endless_gates(text):
    """The blocks of code with a gate whose skips nothing stops, on a page without a word on the warning of skips."""
    if re.search(r"warns after 20 skipped steps in a row|After 20, 40, 80, ... skips in a row, a warning", text):
        return []
    code = re.findall(r"^```py.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for block in code if "SkipStep(" in block and "max_consecutive_skips" not in block]


def test_endless_gates_are_found():
    block = "```python\nModular(model, SkipStep(), Adam()%s)\n```\n"
    assert len(endless_gates(block % "")) == 1
    assert not endless_gates(block % ", max_consecutive_skips=20")
    assert not endless_gates("`SkipStep` warns after 20 skipped steps in a row.\n" + block % "")


@pytest.mark.parametrize("page", WITH_README, ids=page_id)
def test_examples_with_a_gate_stop_or_say_that_they_do_not(page):
    assert not endless_gates(page.read_text())


def placeholders(text):
    """What stands for something that is yet to be written, outside of code."""
    return re.findall(r"\b[A-Z]+_[A-Z]{4,}\b|TODO|FIXME", re.sub(r"`[^`]*`", "", text))


def test_placeholders_are_found_outside_of_code():
    assert placeholders("run on VERSIONS_DATE:\n\nVERSIONS_TABLE") == ["VERSIONS_DATE", "VERSIONS_TABLE"]
    assert placeholders("`HYPOTHESIS_PROFILE`, AUC and a TODO") == ["TODO"]
    assert placeholders("```sh\nNO_COLOR_PLEASE=1 run\n```") == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_placeholder_is_left(page):
    assert placeholders(page.read_text()) == []


def section(page, heading):
    """The text of a page below a heading, up to the next one."""
    return re.split(r"^##+ ", (DOCS / page).read_text().partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[
        0
    ]


ADVICE = {
    "PPO": (
        "recipes/ppo.md",
        ["faq.md#PPO and reinforcement learning: which limit?", "frameworks.md#stable-baselines3"],
    ),
    "an unknown limit": (
        "choosing_a_limit.md",
        ["faq.md#Which `max_norm` should I use?", "transforms/choose.md#Which transform?"],
    ),
}
"""The page that has measured which transform a task needs, and the places that repeat its advice."""


@pytest.mark.parametrize("task", ADVICE)
def test_advice_about_a_task_is_that_of_the_page_that_measured_it(task):
    page, places = ADVICE[task]
    assert "is the simplest choice that is worse in no task" in " ".join((DOCS / page).read_text().split())
    others = re.compile(r"\b(ZClip|AutoClip|AdaGC|ClipNormGrowth|SkipStep)\(")
    for place in places:
        text = section(*place.split("#"))
        assert Path(page).name in text, place
        assert not others.search(text if task == "PPO" else text.partition("before the step")[0]), place
    row = {"PPO": "reinforcement learning", "an unknown limit": "any other run"}[task]
    line = next(line for line in (DOCS / "adaptive.md").read_text().splitlines() if line.startswith(f"| {row} |"))
    assert Path(page).name in line.split("|")[2]
