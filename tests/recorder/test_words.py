"""Names have a place in a table, however long they are."""

from torchzero_clip.recorder.words import as_table, short


def test_a_long_name_keeps_its_ends_and_stays_different_from_others():
    assert short("model.layers.0.weight") == "model.layers.0.weight"
    names = [f"{'a' * 1500}{k}{'b' * 1500}" for k in range(1000)]
    found = {short(name) for name in names}
    assert len(found) == 1000
    assert {len(name) for name in found} == {80}
    assert all(name.startswith("a" * 35) and name.endswith("b" * 35) for name in found)


def test_a_name_of_3000_characters_does_not_widen_a_table():
    lines = as_table([("name", "norm"), ("x" * 3000, "1"), ("\n" * 3000, "2"), ("\ud800" * 99, "3")]).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) == 80 + len("  norm")
