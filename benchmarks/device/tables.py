"""The results of a run as a page of Markdown tables."""

from collections.abc import Mapping

from benchmarks.device.run import Result, Run

COLUMNS = {
    "device": "GPU",
    "host": "Python",
    "wall": "both",
    "launches": "launches",
    "waits": "synchronizations",
    "held": "held MiB",
    "peak": "peak MiB",
    "difference": "difference",
    "right": "right",
}
TIMES = ("device", "host", "wall")


def page(run: Run) -> str:
    """All tables, the errors, and what was left out."""
    about = ", ".join(f"{key} {value}" for key, value in run.about.items())
    parts = [f"# Measured on a device\n\n{about}. {run.elapsed:.0f} s."]
    parts += [f"## {name}\n\n{table(rows)}" for name, rows in run.results.items() if rows]
    if run.errors:
        parts.append("## Errors\n\n" + "\n".join(f"* {name}: {error}" for name, error in run.errors.items()))
    if run.left_out:
        names = "\n".join(f"* {name}" for name in run.left_out)
        parts.append(f"## Left out\n\nRows without a reason had no time.\n\n{names}")
    return "\n\n".join(parts) + "\n"


def table(rows: Mapping[str, Result]) -> str:
    """A row for each result. Times are milliseconds, and in parentheses relative to torch's clip and AdamW."""
    columns = [key for key in COLUMNS if any(row.get(key) is not None for row in rows.values())]
    lines = [["", *(COLUMNS[key] for key in columns)], ["---"] * (len(columns) + 1)]
    lines += [[f"`{name.strip()}`", *(cell(row, key) for key in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row: Result, key: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key not in TIMES:
        return str(value) if isinstance(value, int) else f"{value:.2g}" if key == "difference" else f"{value:.1f}"
    ratio = row.get(f"{key} ratio")
    return f"{value:.3g}" if ratio is None else f"{value:.3g} ({ratio:.2f})"
