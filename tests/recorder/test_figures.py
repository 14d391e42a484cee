"""Pictures show what was recorded, whatever was recorded."""

import math
import sys
from itertools import pairwise

import pytest
import torch
from ranks import run_program
from recorder import records
from recorder.records import column, made

from torchzero_clip import Recorder, read_record
from torchzero_clip.recorder.binning import Events, Tiles, in_columns, largest, medians_of_columns
from torchzero_clip.recorder.data import Block, Ratios
from torchzero_clip.recorder.figures import draw_record, draw_series
from torchzero_clip.recorder.panels import printable
from torchzero_clip.recorder.suggestion import suggested

matplotlib = pytest.importorskip("matplotlib")
NAN, INF = math.nan, math.inf


def spiky(count=300, at=200):
    norms = torch.linspace(0.9, 1.1, count).tolist()
    norms[at] = 50.0
    return norms


def texts(figure):
    return {text.get_text() for text in figure.findobj(matplotlib.text.Text)}


def tiles_of(record):
    return Tiles.of(record, Events.of(record))


def labels(axes):
    return axes.get_legend_handles_labels()[1]


EXTREME = records.EXTREME | {
    "no steps": made([]),
    "all inf": made([INF] * 30),
    "equal": made([1.0] * 30),
    "mixed": made([1.0, NAN, INF, 0.0, 2.0] * 6),
    "smallest": made([1e-300, 5e-324] * 15),
    "a limit of 0": made([1.0] * 30, metrics={"clip/limit": column([0.0] * 30), "clip/clipped": column([1.0] * 30)}),
    "losses": made([1.0] * 30, loss=column([1e308, -1e308, INF, NAN, 0.0] * 6)),
    "skipped": made([5.0] * 30, reasons=["skip_step"] * 30),
    "names": made(spiky(), layers=("$x^$", "層.重み\n", "", "\ud800" * 90, "<script>")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_records_are_drawn(name, tmp_path):
    figure = draw_record(EXTREME[name], tmp_path / "norms.png")
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(figure, matplotlib.figure.Figure)


def test_the_spike_the_limit_and_skipped_steps_are_named():
    limit = column([1.05] * 300)
    clipped = column([1.0 if norm > 1.05 else 0.0 for norm in spiky()])
    clipped[200] = NAN
    reasons = ["skip_step" if step == 200 else "" for step in range(300)]
    record = made(spiky(), metrics={"clip_norm/limit": limit, "clip_norm/clipped": clipped}, reasons=reasons)
    figure = draw_record(record)
    norms, shares, *_ = figure.axes
    assert labels(norms) == [
        "norm",
        "limit: 1.05",
        "spikes: 1",
        "skipped: 1 steps",
    ]
    assert "step 200" in texts(figure)
    marked = {line.get_label(): line for line in norms.lines}
    assert [list(values) for values in marked["spikes: 1"].get_data()] == [[200], [50]]
    assert marked["spikes: 1"].get_marker() != marked["skipped: 1 steps"].get_marker()
    assert shares.get_ylabel() == "% clipped"


def test_norms_that_are_not_finite_are_marked_at_the_upper_edge():
    norms = spiky()
    norms[100] = NAN
    figure = draw_record(made(norms))
    assert "step 100" in texts(figure)
    (mark,) = [line for line in figure.axes[0].lines if list(line.get_xdata()) == [100] and line.get_ydata()[0] < 1]
    assert mark.get_transform() != figure.axes[0].transData


def test_early_signs_are_marked():
    ratios = [Ratios(k, column([1.0]), column([0.5 if k == 20 else 0.01])) for k in range(30)]
    axes, *_ = draw_record(made([1.0] * 30, ratios=ratios)).axes
    (mark,) = [line for line in axes.lines if line.get_label() == "early signs: 1"]
    assert [list(values) for values in mark.get_data()] == [[20], [1]]


def test_only_the_first_step_of_a_run_without_norms_is_labelled():
    figure = draw_record(made([1.0] * 100 + [NAN] * 200))
    assert [text for text in texts(figure) if text.startswith("step ")] == ["step 100"]


@pytest.mark.slow
def test_a_spike_is_visible_among_100_000_steps():
    norms = spiky(100_000, at=51_234)
    figure = draw_record(made(norms, layers=()))
    highest, *_ = [line for line in figure.axes[0].lines if line.get_label() == "largest of 100 steps"]
    assert len(highest.get_xdata()) == 1000
    assert max(highest.get_ydata()) == 50
    assert "step 51,234" in texts(figure)


@pytest.mark.slow
def test_the_loss_is_drawn_if_known():
    assert "loss" not in texts(draw_record(made([1.0] * 30)))
    assert "loss" in texts(draw_record(made([1.0] * 30, loss=column([2.0] * 30))))


def test_of_500_layers_those_that_stood_out_most_are_named():
    norms = torch.ones(300, 500, dtype=torch.float64)
    norms[200, 321], norms[200, 7] = 80.0, NAN
    record = made(spiky(), layers=[f"layers.{i}.weight" for i in range(500)], layer_norms=norms)
    figure = draw_record(record)
    shown = texts(figure)
    assert "layers.321.weight" in shown
    assert "layers.7.weight" in shown
    assert sum(text.endswith(".weight") for text in shown) == 25
    assert "25 of 500 layers that stood out most: largest norm / median norm of the run" in shown
    assert "inf or NaN" in shown


@pytest.mark.slow
def test_names_of_layers_do_not_overlap():
    layers = [f"model.{'very_' * 10}long.{i}.weight" for i in range(25)]
    record = made(spiky(), layers=layers)
    figure = draw_record(record)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[1].get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0


@pytest.mark.slow
def test_labels_of_steps_do_not_overlap():
    norms = [1.0] * 2000
    for step in range(100, 2000, 40):
        norms[step] = 20.0 + step % 7
    norms[0] = norms[1999] = 30.0
    for start in (0, 500_000):
        record = made(norms, layers=())
        record.steps = [start + step for step in record.steps]
        figure = draw_record(record)
        figure.draw_without_rendering()
        boxes = [t.get_window_extent() for t in figure.axes[0].texts]
        assert 4 <= len(boxes) <= 6
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_series_shows_what_was_left_out_and_its_spikes():
    norms = torch.cat([torch.linspace(10, 1, 200), torch.linspace(0.9, 1.1, 800)]).double()
    norms[500] = 40.0
    found = suggested({"joint": norms}, 0.01, "joint")
    figure = found.plot()
    axes, side = figure.axes
    assert "left out: still changing" in labels(axes)
    assert f"limit {found.limit:.4g}, 1 spike" in texts(figure)
    (spikes,) = [line for line in axes.lines if line.get_label() == "spikes"]
    assert [list(values) for values in spikes.get_data()] == [[500], [40]]
    assert sum(bar.get_width() for bar in side.patches) == 1000 - found.series["joint"].start


@pytest.mark.slow
def test_at_most_six_groups_are_drawn_and_the_others_counted():
    norms = {f"group {i}": torch.linspace(0.9, 1.1, 50).double() for i in range(8)}
    found = suggested(norms, 0.01, "group")
    figure = draw_series(found.series, found.limits, None)
    assert len(figure.axes) == 12
    assert "norms in the order of steps (2 more groups are not drawn)" in texts(figure)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e-320, 1e308])
def test_series_of_extreme_norms_are_drawn(factor, tmp_path):
    norms = torch.linspace(0.5, 1, 40).double() * factor
    suggested({"joint": norms}, 0.01, "joint").plot(tmp_path / "limit.png")
    assert (tmp_path / "limit.png").exists()


def test_nothing_global_changes():
    before = dict(matplotlib.rcParams)
    draw_record(made(spiky()), None)
    assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
def test_matplotlib_is_imported_when_a_picture_is_drawn_and_pyplot_never():
    code = (
        "import sys, torch; from torchzero_clip import Record; one = torch.ones(1, dtype=torch.float64);"
        "assert 'matplotlib' not in sys.modules; Record([0], [''], one, one, {}, ['a'], [0], one[None]).plot();"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = run_program([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("draw", [lambda r: r.plot(), lambda r: r.suggest_max_norm().plot()])
def test_without_matplotlib_the_error_says_what_to_install(draw, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="needs matplotlib: pip install matplotlib"):
        draw(made(spiky()))


@pytest.mark.parametrize(
    ("name", "most", "short"),
    [
        ("layers.0.weight", 40, "layers.0.weight"),
        ("transformer.layers.0.mlp.up.weight", 20, "t.l.0.mlp.up.weight"),
        ("a" * 50, 20, "aaaaa…" + "a" * 14),
        ("層\n$", 10, "??$"),
    ],
)
def test_long_and_unprintable_names_are_shortened(name, most, short):
    assert printable(name, most) == short


def test_columns_take_the_median_and_the_largest_of_what_is_known():
    values = column([1.0, 5.0, 3.0, NAN, 7.0, NAN, NAN, NAN, NAN, 2.0])
    assert in_columns(values, 3, largest).nan_to_num(nan=-1).tolist() == [5, 7, -1, 2]
    assert in_columns(values, 3, medians_of_columns).nan_to_num(nan=-1).tolist() == [3, 7, -1, 2]


def test_bars_are_equally_wide_on_a_log_axis():
    found = suggested({"joint": column([1.0, 1.1, 10.0, 100.0] * 10)}, 0.01, "joint")
    bars = found.plot().axes[1].patches
    edges = column([bars[0].get_y(), *(bar.get_y() + bar.get_height() for bar in bars)])
    widths = edges.log10().diff()
    assert widths.max() - widths.min() < 1e-9
    assert (edges[0], edges[-1]) == (pytest.approx(1, rel=0.03), pytest.approx(100, rel=0.03))
    counts = [bar.get_width() for bar in bars]
    assert counts[0] + counts[1] == 20
    assert sum(counts) == 40


def test_tiles_of_a_file_are_its_blocks_and_gaps_are_left_empty():
    blocks = [Block(0, 99, column([1.0]), column([8.0])), Block(200, 299, column([1.0]), column([2.0]))]
    tiles = tiles_of(made([1.0], blocks=blocks))
    assert tiles.edges == [-0.5, 0.5, 99.5, 199.5, 299.5]  # step 0 has its own column
    assert tiles.ratios.nan_to_num(nan=-1.0).tolist() == [[1.0, 8.0, -1.0, 2.0]]


def with_jump(path=None):
    """A run of 600 steps with 60 layers, of which layer 50 jumps in step 320, and 30 others jumped further before."""
    params = [(f"layers.{i}", torch.nn.Parameter(torch.zeros(1))) for i in range(60)]
    optimizer = torch.optim.SGD(params, 0.0)
    recorder = Recorder(optimizer, path=path, ratios_every=0)
    norms = torch.rand(600, 60, generator=torch.Generator().manual_seed(0)).mul(0.5).exp()
    norms[range(100, 310, 7), range(30)] *= 100
    norms[320, 50] *= 20
    for of_step in norms:
        for (_, param), norm in zip(params, of_step, strict=True):
            param.grad = norm.view(1)
        optimizer.step()
    recorder.close()
    return recorder, norms


@pytest.fixture(scope="module")
def jump(tmp_path_factory):
    return with_jump(tmp_path_factory.mktemp("jump") / "run.jsonl")


@pytest.mark.parametrize("is_read", [True, False])
def test_the_first_layer_of_worst_of_each_spike_has_a_row_its_mark_and_a_column(jump, is_read):
    recorder, norms = jump
    record = read_record(recorder._log.path) if is_read else recorder.record()
    tiles = tiles_of(record)
    marks = dict(tiles.marks)
    assert sorted(marks) == record.spikes() == [*range(100, 310, 7), 320]
    for step in marks:
        row = tiles.names.index(record.worst(step)[0].name)
        assert marks[step] == row
        (column,) = [k for k, (a, b) in enumerate(pairwise(tiles.edges)) if a < step < b]
        layer = int(tiles.names[row].removeprefix("layers."))
        usual = record.layer_norms[:, layer].median() if not is_read else None
        found = float(tiles.ratios[row, column])
        assert found > 15 if usual is None else found == pytest.approx(float(norms[step, layer] / usual), rel=0.01)
    assert "first layer of worst(step)" in texts(draw_record(record))


def test_a_block_without_its_spike_has_the_color_of_its_median(jump):
    record = read_record(jump[0]._log.path)
    tiles = tiles_of(record)
    row = tiles.names.index("layers.50")
    high = [
        (a, b) for (a, b), ratio in zip(pairwise(tiles.edges), tiles.ratios[row].tolist(), strict=True) if ratio > 3
    ]
    assert high
    assert min(a for a, _ in high) > 318
    assert max(b for _, b in high) < 322


def test_steps_after_the_last_block_of_a_killed_run_are_drawn():
    norms = torch.ones(110, 1, dtype=torch.float64)
    norms[105] = 40.0
    blocks = [Block(0, 99, column([1.0]), column([1.0]))]
    steps = [*range(50), 105]
    record = made(norms.flatten().tolist(), layer_steps=steps, layer_norms=norms[steps], blocks=blocks)
    tiles = tiles_of(record)
    (place,) = [k for k, (a, b) in enumerate(pairwise(tiles.edges)) if a < 105 < b]
    assert float(tiles.ratios[0, place]) == 40.0
    assert torch.isnan(tiles.ratios[0, place - 1])  # steps 100 to 104 were not recorded


@pytest.mark.slow
def test_text_is_readable_when_a_picture_is_as_wide_as_the_report_draws_it():
    """9 inches on 960 pixels: 12 pixels are 8.1 points."""
    figure = draw_record(made(spiky(), layers=[f"layer {i}" for i in range(30)]))
    figure.draw_without_rendering()
    drawn = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in drawn) > 8.1


def test_a_short_run_in_a_file_has_a_column_for_each_step(tmp_path):
    optimizer = torch.optim.SGD([("w", torch.nn.Parameter(torch.ones(1)))], 0.1)
    recorder = Recorder(optimizer, path=tmp_path / "run.jsonl")
    for step in range(40):
        optimizer.param_groups[0]["params"][0].grad = torch.full((1,), 1.0 + step % 2)
        optimizer.step()
    recorder.close()
    tiles = tiles_of(read_record(tmp_path / "run.jsonl"))
    assert tiles.edges == [step - 0.5 for step in range(41)]
    assert torch.equal(tiles.ratios, tiles_of(recorder.record()).ratios)


def test_events_group_runs_of_norms_that_are_not_finite():
    events = Events.of(made([1.0, NAN, NAN, 1.0] * 2 + spiky(30, 20)))
    assert events.worst() == ({1: 2, 5: 2}, [28])
