"""The commands print what they found, and every error as one line."""

import importlib
import sys

import pytest
import torch
from ranks import run_program
from recorder.records import run_line, step_line

from torchzero_clip import read_record

main = importlib.import_module("torchzero_clip.__main__").main


@pytest.fixture
def file(tmp_path):
    """A run of 100 steps with a spike."""
    path = tmp_path / "run.jsonl"
    norms = torch.exp(0.2 * torch.randn(100)).tolist()
    norms[50] = 50.0
    path.write_text("\n".join([run_line("x", layers=["weight"]), *(step_line(i, norm=x) for i, x in enumerate(norms))]))
    return path


def error_of(capsys, *arguments):
    """The message of a command that fails."""
    assert main([str(argument) for argument in arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(("options", "share"), [([], 0.01), (["--share-clipped", "0.1"], 0.1)])
def test_suggest_prints_the_suggestion(options, share, file, capsys):
    assert main(["suggest", str(file), *options]) == 0
    assert capsys.readouterr().out == f"{read_record(file).suggest_max_norm(share)}\n"


@pytest.mark.slow
def test_suggest_draws(file, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["suggest", str(file), "--plot", str(tmp_path / "limit.png")]) == 0
    assert (tmp_path / "limit.png").read_bytes().startswith(b"\x89PNG")


def test_report_writes_the_page_and_prints_its_path(file, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("torchzero_clip.recorder.report.png_of", lambda figure: b"png")
    assert main(["report", str(file), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(file)]) == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("command", ["suggest", "report"])
def test_what_cannot_be_read_is_named(command, file, tmp_path, capsys):
    missing = tmp_path / "no.jsonl"
    assert error_of(capsys, command, missing) == f"error: {missing}: No such file or directory\n"
    assert str(tmp_path) in error_of(capsys, command, tmp_path)
    with file.open("a") as out:
        out.write('\n{"kind": "step", "step": "x"}\n')
    assert "line 102" in error_of(capsys, command, file)
    file.write_bytes(b"\xff\xfe\x00" * 10)
    assert "not written by a Recorder" in error_of(capsys, command, file)


def test_an_empty_file(tmp_path, capsys):
    (tmp_path / "run.jsonl").touch()
    assert "at least 20 norms" in error_of(capsys, "suggest", tmp_path / "run.jsonl")
    page = tmp_path / "page.html"
    assert "the record has no steps" in error_of(capsys, "report", tmp_path / "run.jsonl", "-o", page)
    assert not page.exists()


@pytest.mark.parametrize("share", ["0", "1", "-1", "nan", "inf"])
def test_a_share_out_of_range(share, file, capsys):
    assert "share_clipped" in error_of(capsys, "suggest", file, f"--share-clipped={share}")


@pytest.mark.parametrize("arguments", [["suggest", "--plot"], ["report", "-o"]])
def test_without_matplotlib(arguments, file, tmp_path, capsys, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    command, option = arguments
    assert "needs matplotlib: pip install matplotlib" in error_of(capsys, command, file, option, tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


@pytest.mark.slow
def test_a_picture_or_page_that_cannot_be_written(file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    nowhere = tmp_path / "nowhere"
    assert "No such file" in error_of(capsys, "report", file, "-o", nowhere / "page.html")
    assert "No such file" in error_of(capsys, "suggest", file, "--plot", nowhere / "limit.png")
    assert "xyz" in error_of(capsys, "suggest", file, "--plot", tmp_path / "limit.xyz")


@pytest.mark.parametrize(("command", "option"), [("report", "-o"), ("suggest", "--plot")])
def test_the_record_is_not_written_over(command, option, file, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    before = file.read_bytes()
    (tmp_path / "soft.html").symlink_to(file)
    (tmp_path / "hard.html").hardlink_to(file)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    for output in (file, "../run.jsonl", "../soft.html", tmp_path / "hard.html"):
        assert "is the file of a Recorder" in error_of(capsys, command, file, option, output)
    assert file.read_bytes() == before


@pytest.mark.parametrize("arguments", [[], ["draw"], ["suggest"], ["suggest", "a", "--share-clipped", "much"]])
def test_wrong_arguments_have_the_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: python -m torchzero_clip" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["suggest", "--help"], ["report", "--help"]])
def test_help_shows_examples(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 0
    assert "python -m torchzero_clip" in capsys.readouterr().out


@pytest.mark.slow
def test_the_module_runs(file, tmp_path):
    command = [sys.executable, "-m", "torchzero_clip", "suggest"]
    found = run_program([*command, file])
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("ClipNorm(")
    failed = run_program([*command, tmp_path / "no.jsonl"])
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")
