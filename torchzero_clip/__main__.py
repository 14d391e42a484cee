"""Commands that read the file of a `Recorder`, such as ``python -m torchzero_clip suggest run.jsonl``."""

import argparse
import sys
from collections.abc import Sequence

from torchzero_clip.recorder.reading import read_record
from torchzero_clip.recorder.report import write_report

EXAMPLES = """examples:
  python -m torchzero_clip suggest run.jsonl
  python -m torchzero_clip suggest run.jsonl --share-clipped 0.05 --plot limit.png
  python -m torchzero_clip report run.jsonl -o report.html

Recorder(optimizer, path="run.jsonl") writes the file.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status: 1 after an error."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (OSError, ValueError, OverflowError, ModuleNotFoundError) as error:
        sys.stderr.write(f"error: {_in_one_line(error)}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    text = "Read the file of a Recorder: suggest a limit for gradient clipping, or write a report of the run."
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m torchzero_clip", description=text, epilog=EXAMPLES, formatter_class=raw)
    commands = parser.add_subparsers(title="commands", metavar="{suggest,report}", required=True)
    suggest = commands.add_parser("suggest", help="print a limit for ClipNorm, and how well the record determines it")
    suggest.add_argument("file", help="the file that a Recorder wrote, such as run.jsonl")
    share = "the share of usual steps that the limit clips, above 0 and below 1 (default: %(default)s)"
    suggest.add_argument("--share-clipped", type=float, default=0.01, metavar="SHARE", help=share)
    suggest.add_argument("--plot", metavar="FILE", help="save a picture of the norms and the limit, such as limit.png")
    suggest.set_defaults(run=_suggest)
    report = commands.add_parser("report", help="write an HTML page with pictures, the worst steps and layers")
    report.add_argument("file", help="the file that a Recorder wrote, such as run.jsonl")
    place = "where to write the page (default: %(default)s)"
    report.add_argument("-o", "--output", default="report.html", metavar="FILE", help=place)
    report.set_defaults(run=_report)
    return parser


def _suggest(options: argparse.Namespace) -> None:
    suggestion = read_record(options.file).suggest_max_norm(options.share_clipped)
    if options.plot is not None:
        suggestion.plot(options.plot)
    sys.stdout.write(f"{suggestion}\n")


def _report(options: argparse.Namespace) -> None:
    write_report(read_record(options.file), options.output)
    sys.stdout.write(f"{options.output}\n")


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
