"""What a record prints."""

from recorder.records import column, made


def test_a_long_record_prints_in_one_short_text():
    record = made([1.0] * 5000, layers=("weight", "bias"), metrics={"clip_norm/factor": column([0.5] * 5000)})
    assert repr(record) == (
        "Record of 5,000 steps, from 0 to 4,999, and 2 layers. Vectors with a number for each step: "
        "norm, loss, metrics['clip_norm/factor']. "
        'To read it: rows(), frame(), spikes(), worst(step=...), plot("norms.png").'
    )


def test_a_record_without_steps_prints():
    assert repr(made([])).startswith("Record of 0 steps, and 1 layer. ")


def test_the_methods_that_a_record_prints_exist():
    for method in ("rows", "frame", "spikes", "worst", "plot"):
        assert f"{method}(" in repr(made([1.0]))
        assert callable(getattr(made([1.0]), method))
