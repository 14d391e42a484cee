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
  python -m torchzero_clip compare one_process.jsonl eight_processes.jsonl

Recorder(optimizer, path="run.jsonl") writes the file.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status: 1 after an error; of `compare`, 1 for differences, 2 for errors."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (OSError, ValueError, OverflowError, ModuleNotFoundError) as error:
        sys.stderr.write(f"error: {_in_one_line(error)}\n")
        return options.error


def _parser() -> argparse.ArgumentParser:
    text = "Read files of Recorders: suggest a limit for gradient clipping, write a report, or compare two runs."
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m torchzero_clip", description=text, epilog=EXAMPLES, formatter_class=raw)
    commands = parser.add_subparsers(title="commands", metavar="{suggest,report,compare}", required=True)
    suggest = commands.add_parser("suggest", help="print a limit for ClipNorm, and how well the record determines it")
    suggest.add_argument("file", help="the file that a Recorder wrote, such as run.jsonl")
    share = "the share of usual steps that the limit clips, above 0 and below 1 (default: %(default)s)"
    suggest.add_argument("--share-clipped", type=float, default=0.01, metavar="SHARE", help=share)
    suggest.add_argument("--plot", metavar="FILE", help="save a picture of the norms and the limit, such as limit.png")
    suggest.set_defaults(run=_suggest, error=1)
    report = commands.add_parser("report", help="write an HTML page with pictures, the worst steps and layers")
    report.add_argument("file", help="the file that a Recorder wrote, such as run.jsonl")
    place = "where to write the page (default: %(default)s)"
    report.add_argument("-o", "--output", default="report.html", metavar="FILE", help=place)
    report.set_defaults(run=_report, error=1)
    compare = commands.add_parser("compare", help="print where the norms of two runs part; exit with 1 if they do")
    for place in ("first", "second"):
        compare.add_argument(place, help=f"the file of the {place} run")
    compare.add_argument("--plot", metavar="FILE", help="save a picture of the ratios of layers by steps")
    compare.add_argument("--runs", nargs=2, metavar=("FIRST", "SECOND"), help="the ids of runs, if files have several")
    compare.set_defaults(run=_compare, error=2)
    return parser


def _suggest(options: argparse.Namespace) -> int:
    suggestion = read_record(options.file).suggest_max_norm(options.share_clipped)
    if options.plot is not None:
        suggestion.plot(options.plot)
    sys.stdout.write(f"{suggestion}\n")
    return 0


def _report(options: argparse.Namespace) -> int:
    write_report(read_record(options.file), options.output)
    sys.stdout.write(f"{options.output}\n")
    return 0


def _compare(options: argparse.Namespace) -> int:
    runs = options.runs or (None, None)
    comparison = read_record(options.first, runs[0]).compare(read_record(options.second, runs[1]))
    if options.plot is not None:
        comparison.plot(options.plot)
    sys.stdout.write(f"{comparison}\n")
    return int(comparison.differs)


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
