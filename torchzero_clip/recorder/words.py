"""Numbers as text for people."""

import math


def number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "unknown"


def norm(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "inf or NaN"


def times(ratio: float) -> str:
    """A ratio; empty if it is unknown."""
    if not math.isfinite(ratio):
        return "" if math.isnan(ratio) else "inf"
    return f"{ratio:.3g}x" if not 100 <= ratio < 1e6 else f"{ratio:,.0f}x"


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def was(count: int) -> str:
    return "was" if count == 1 else "were"


def as_table(rows: list[tuple[str, ...]]) -> str:
    """Rows as text; the first column is aligned to the left, the others to the right."""
    rows = [
        tuple(cell.encode("unicode_escape").decode() if not cell.isprintable() else cell for cell in row)
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
