"""A report is one page that people and programs can read."""

import math
import re
from html.parser import HTMLParser

import pytest
import torch
from recorder import records
from recorder.records import column, made

from torchzero_clip.recorder.data import Block, Ratios
from torchzero_clip.recorder.report import write_report

pytest.importorskip("matplotlib")
NAN, INF = math.nan, math.inf
VOID = {"meta", "img", "br", "wbr", "source", "input"}


class Page(HTMLParser):
    """The tags of a page, its text, and the cells of its tables."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.tables, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append({"caption": "", "rows": []})
        if tag == "tr":
            self.tables[-1]["rows"].append([])
        if tag in ("th", "td"):
            self.tables[-1]["rows"][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words.append(data)
        if "caption" in self.open:
            self.tables[-1]["caption"] += data
        elif self.open and self.open[-1] in ("th", "td"):
            self.tables[-1]["rows"][-1][-1] += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    def table(self, start):
        return next(table["rows"] for table in self.tables if table["caption"].startswith(start))


def run(layers=("first.weight", "second.weight")):
    """100 steps: 40 is a spike that was clipped, mostly of the second layer; 60 was skipped; 80 is NaN."""
    norms = torch.full((100, 2), 1.0, dtype=torch.float64)
    norms[:, 0] += torch.linspace(0, 0.01, 100)
    norms[40, 1], norms[60] = 30.0, 8.0
    norms[80, 0] = NAN
    joint = norms.square().sum(dim=1).sqrt()
    reasons = [""] * 100
    reasons[60], reasons[80] = "skip_step", "nonfinite"
    factor = (2 / joint).clamp(max=1)
    clipped = (joint > 2).double()
    mean = column([1.5] * 100)
    for values in (factor, clipped):
        values[[60, 80]] = NAN
    mean[59] = 9.0  # of another step
    metrics = {
        "skip_step/mean": mean,
        "clip_norm/factor": factor,
        "clip_norm/clipped": clipped,
        "clip_norm/limit": column([2.0] * 100),
    }
    ratios = [
        Ratios(0, column([10.0, 4.0]), column([0.01, 0.02])),
        Ratios(50, column([10.0, 4.0]), column([0.5, 0.02])),
    ]
    loss = column([3.0] * 100)
    options = {"layer_norms": norms, "reasons": reasons, "metrics": metrics, "ratios": ratios, "loss": loss}
    return made(joint.tolist(), layers, **options)


def report(record, tmp_path):
    write_report(record, tmp_path / "report.html")
    return Page((tmp_path / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def _quick(monkeypatch):
    """Pictures that take no time."""
    monkeypatch.setattr("torchzero_clip.recorder.report.png_of", lambda figure: b"png")


quick = pytest.mark.usefixtures("_quick")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return report(run(), tmp_path_factory.mktemp("report"))


@pytest.mark.slow
def test_the_summary_counts_what_happened(page):
    assert (
        "100 steps were recorded: steps 0 to 99. The joint norm of all gradients had the median 1.418. The largest was "
        "30.02, in step 40. Gradients were clipped in 1 step (1%). 2 steps were skipped. There were 3 spikes (1 with a "
        "norm that is inf or NaN)."
    ) in page.text


def test_the_suggestion_is_quoted_with_code_to_copy(page):
    suggestion = run().suggest_max_norm()
    for line in str(suggestion).split("\n"):
        assert line in page.text
    assert f'ClipNorm({suggestion.limit:.4g}, dim="global")' in page.text
    assert f"clip_grad_norm_(model.parameters(), {suggestion.limit:.4g})" in page.text


def test_the_worst_steps_say_what_each_transform_did(page):
    head, *rows = page.table("Spikes and skipped steps")
    assert head == ["Step", "Norm", "Usual", "Ratio", "Loss", "What happened"]
    usual = run().norm[:40].quantile(0.5)
    assert rows[0][:2] == ["80", "inf or NaN"]
    assert rows[0][-1] == "skipped: a gradient was inf or NaN"
    assert rows[1] == [
        "40",
        "30.02",
        f"{usual:.4g}",
        f"{30.02 / usual:.3g}x",
        "3",
        "clip_norm: limit 2, factor 0.06663, clipped 100%",
    ]
    assert rows[2][-1] == "skipped by skip_step, whose running mean was 1.5"


def test_the_layers_of_the_worst_steps_are_those_of_worst(page):
    _, *rows = page.table("The 5 layers")
    assert [row[0] for row in rows] == ["80", "80", "40", "40", "60", "60"]
    assert rows[0][1:3] == ["first.weight", "inf or NaN"]
    assert rows[2][1:] == ["second.weight", "30", "1", "30x"]


def test_ratios_of_updates_are_listed(page):
    _, *rows = page.table("The norm of the update")
    assert rows == [["second.weight", "0.005", "0.005", "0"], ["first.weight", "0.001", "0.05", "50"]]


def test_the_sections_are_in_order(page):
    places = {attrs["href"][1:] for attrs in page.all("a")}
    assert places == {attrs["id"] for attrs in page.all("section")}
    words = [word for word in page.words if word.strip()]
    start = words.index("Suggested limit")
    assert words[start : start + len(places)] == [
        "Suggested limit",
        "Norms and layers by step",
        "Worst steps",
        "Layers in the worst steps",
        "Updates relative to parameters",
        "How to read this page",
    ]


def test_the_page_is_accessible(page):
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert len(page.all("h1")) == len(page.all("title")) == len(page.all("main")) == 1
    assert len(page.all("table")) == len(page.all("caption")) == len(page.tables) == 3
    assert all(attrs["scope"] in ("col", "row") for attrs in page.all("th"))
    assert all(table["rows"][0] and table["caption"] for table in page.tables)
    pictures = page.all("img")
    assert len(pictures) == 2
    assert {attrs["for"] for attrs in page.all("label")} == {attrs["id"] for attrs in page.all("input")}
    assert all(re.search(r"\d", attrs["alt"]) for attrs in pictures)
    assert "Worst steps: 80, 40, 60." in pictures[1]["alt"]


@quick
def test_nothing_is_loaded_from_elsewhere(page, tmp_path):
    for tag, attrs in page.tags:
        assert tag not in ("script", "link", "iframe", "object")
        for key in ("src", "srcset", "href"):
            assert attrs.get(key, "#").startswith(("#", "data:image/png;base64,"))
    write_report(run(), tmp_path / "report.html")
    style = (tmp_path / "report.html").read_text().split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def luminance(color):
    digits = color * 2 if len(color) == 3 else color
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@quick
def test_the_contrast_of_text_is_at_least_that_of_wcag_aa(tmp_path):
    write_report(run(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    in_the_dark = text.split("@media (prefers-color-scheme: dark)")[1].split("body {")[0]
    light, dark = (dict(re.findall(r"--(\w+): #(\w+);", part)) for part in (text.split("@media")[0], in_the_dark))
    for colors in (light, dark):
        for ground in ("page", "box"):
            for words in ("text", "soft"):
                low, high = sorted(luminance(colors[name]) for name in (ground, words))
                assert (high + 0.05) / (low + 0.05) >= 4.5


@quick
def test_names_from_a_file_are_escaped(tmp_path):
    bad = '<script>alert("1")</script>&'
    record = run(layers=(bad, "'><img src=x>"))
    record.reasons[60] = f"{bad}"
    record.metrics[f"{bad}/factor"] = column([0.5] * 100)
    page = report(record, tmp_path)
    assert not page.all("script")
    assert len(page.all("img")) == 2
    assert bad in page.text
    assert f"{bad}: factor 0.5" in page.text
    assert "'><img src=x>" in page.text


EXTREME = records.EXTREME | {
    "inf": made([1.0] * 40 + [INF]),
    "lone surrogate": made([1.0] * 40 + [90.0], layers=("\ud800",)),
    "ratios unknown": made([1.0] * 30, ratios=[Ratios(0, column([0.0]), column([1.0]))]),
    "metrics unknown": made([1.0] * 40 + [90.0], metrics={"clip/limit": column([NAN] * 41)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_records_have_a_page(name, tmp_path):
    page = report(EXTREME[name], tmp_path)
    assert "nan" not in page.text.lower().replace("nan (", "").replace("inf or nan", "").replace("nan count", "")


@quick
def test_with_fewer_than_20_norms_the_page_says_why_there_is_no_suggestion(tmp_path):
    page = report(made([1.0] * 19), tmp_path)
    assert "There is no suggestion: a limit needs at least 20 norms that are finite and above 0, got 19" in page.text


@quick
def test_a_run_that_diverged_takes_one_row_and_hides_no_spike(tmp_path):
    norms = [1.0] * 100 + [NAN] * 500
    norms[50] = 30.0
    page = report(made(norms, layers=("a", "b")), tmp_path)
    _, *rows = page.table("Spikes and skipped steps")
    assert [row[0] for row in rows] == ["100", "50"]
    assert "(the norm was not finite in the next 499 steps either)" in rows[0][-1]
    _, *layers = page.table("The 5 layers")
    assert layers[0] == ["100", "(all 2 layers are inf or NaN)", "", "", ""]


@quick
def test_at_most_20_steps_are_listed_and_the_others_counted(tmp_path):
    norms = [1.0] * 1000
    norms[30::30] = [50.0 + i for i in range(len(norms[30::30]))]
    page = report(made(norms), tmp_path)
    _, *rows = page.table("Spikes and skipped steps")
    assert len(rows) == 20
    assert rows[0][0] == "990"
    assert any("(20 of 33 steps)" in table["caption"] for table in page.tables)


def drifting():
    """200 steps in which norms grow by a quarter. Steps 50, 120 and 199 are spikes, each of another layer."""
    norms = torch.linspace(1, 1.25, 200, dtype=torch.float64)[:, None] * column([1.0, 2.0, 3.0])
    for k, step in enumerate((50, 120, 199)):
        norms[step, k] = 500.0
    return made(norms.square().sum(dim=1).sqrt().tolist(), ("a", "b", "c"), layer_norms=norms)


@quick
@pytest.mark.parametrize("has_blocks", [False, True])
def test_a_layer_has_one_ratio_in_a_step_on_the_page_and_in_worst(has_blocks, tmp_path):
    record = drifting()
    if has_blocks:
        parts = [(k, record.layer_norms[k : k + 50]) for k in range(0, 200, 50)]
        record.blocks = [Block(k, k + 49, part.quantile(0.5, dim=0), part.amax(dim=0)) for k, part in parts]
    page = report(record, tmp_path)
    _, *rows = page.table("The 5 layers")
    of_steps = {row[0]: row[1:] for row in reversed(rows)}
    for k, step in enumerate((50, 120, 199)):
        before = [block.median[k] for block in record.blocks if block.last < step]
        usual = float(torch.stack(before).quantile(0.5) if has_blocks else record.layer_norms[:step, k].quantile(0.5))
        assert record.worst(step)[0] == ("abc"[k], 500.0, pytest.approx(usual), pytest.approx(500 / usual))
        assert of_steps[str(step)] == ["abc"[k], "500", f"{usual:.4g}", f"{500 / usual:.0f}x"]


@quick
def test_early_signs_have_a_table_and_are_counted(tmp_path):
    ratios = [Ratios(10 * k, column([2.0, 1.0]), column([0.5 if k == 9 else 0.01, 0.02])) for k in range(10)]
    page = report(made([1.0] * 100, ("first", "second"), ratios=ratios), tmp_path)
    assert "There were 0 spikes. 1 step had an early sign of a spike." in page.text
    head, *rows = page.table("Norms of layers, and updates")
    assert head == ["Step", "Layer", "Number", "Value", "Usual", "Ratio"]
    assert rows == [["90", "first", "update_ratio", "0.25", "0.005", "50x"]]


@quick
def test_long_names_are_cut(tmp_path):
    record = run(layers=("x" * 3000, "y" * 3000))
    record.metrics = {f"{'z' * 3000}/limit": column([2.0] * 100)}
    record.reasons[60] = "w" * 3000
    page = report(record, tmp_path)
    assert max(map(len, "".join(page.words).split())) < 200
    assert max(map(len, str(record.worst(40)).splitlines())) < 120


def test_the_record_is_not_written_over(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "run"}')
    with pytest.raises(ValueError, match="is the file of a Recorder"):
        write_report(run(), path)
    assert path.read_text() == '{"kind": "run"}'


@quick
def test_without_a_spike_the_page_says_so(tmp_path):
    assert "There were no spikes and no skipped steps." in report(made([1.0] * 30), tmp_path).text
