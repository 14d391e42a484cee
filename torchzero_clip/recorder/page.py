"""The parts of an HTML page that loads no other files. Texts are escaped here."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --soft: #57606a; --line: #d0d7de; --box: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --text: #e6e8ea; --soft: #a5adb5; --line: #3d444d; --box: #22272c; }
  figure img { filter: invert(0.92) hue-rotate(180deg); }
}
body { margin: 0 auto; max-width: 64rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; }
h2 { font-size: 1.25rem; margin-top: 2.2rem; }
a { color: inherit; }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; padding: 0; }
p, li, dd { max-width: 46rem; }
dt { font-weight: 600; }
dd { margin: 0 0 .6rem; }
pre { background: var(--box); padding: .8rem; overflow-x: auto; border-radius: .3rem; }
figure { margin: 0; }
figure img { width: 100%; height: auto; border-radius: .3rem; }
figcaption, .soft { color: var(--soft); font-size: .9rem; }
.box { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; max-width: calc(100vw - 3rem); }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  white-space: nowrap; }
thead th { border-bottom: 2px solid var(--line); }
th[scope=row], th[scope=rowgroup], th.text, td.text { text-align: left; }
tbody .text { white-space: normal; }
td.text { min-width: 14rem; }
tbody + tbody { border-top: 2px solid var(--line); }
summary { cursor: pointer; padding: .4rem 0; }
@media (max-width: 600px) {
  table { font-size: .8rem; }
  th, td { padding: .3rem .25rem; }
  thead th { white-space: normal; }
  tbody th.text { min-width: 6rem; overflow-wrap: anywhere; }
  td.text { min-width: 7rem; }
}
"""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        title: Its heading.
        is_text: True for words, which are aligned to the left; False for numbers.
    """

    title: str
    is_text: bool = False


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind!r}' if kind else ''}>{escape(text)}</p>"


def section(name: str, title: str, *parts: str) -> str:
    """A part of the page with a heading and an anchor for links."""
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n' + "\n".join(parts) + "\n</section>"


def code(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>"


def picture(wide: bytes, narrow: bytes, alt: str, caption: str) -> str:
    """A picture for wide windows, and one for narrow ones."""
    small, large = (f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (narrow, wide))
    return (
        f'<figure><picture><source media="(max-width: 600px)" srcset="{small}">'
        f'<img src="{large}" alt="{escape(alt)}"></picture><figcaption>{escape(caption)}</figcaption></figure>'
    )


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the rows."""
    body = "\n".join(f"<tr>{_cells(columns, row)}</tr>" for row in rows)
    return _table(caption, columns, f"<tbody>\n{body}\n</tbody>")


def grouped_table(
    caption: str, columns: Sequence[Column], groups: Sequence[tuple[str, Sequence[Sequence[str]]]]
) -> str:
    """A table of groups of rows: the first column names the group, the second the row."""
    bodies: list[str] = []
    for name, rows in groups:
        first = f'<th scope="rowgroup" rowspan="{len(rows)}">{escape(name)}</th>'
        lines = [f"<tr>{first if i == 0 else ''}{_cells(columns[1:], row)}</tr>" for i, row in enumerate(rows)]
        bodies.append("<tbody>\n" + "\n".join(lines) + "\n</tbody>")
    return _table(caption, columns, "\n".join(bodies))


def _cells(columns: Sequence[Column], row: Sequence[str]) -> str:
    kind = " class=text" if columns[0].is_text else ""
    cells = [f'<th scope="row"{kind}>{escape(row[0]).replace(".", ".<wbr>")}</th>']
    for column, cell in zip(columns[1:], row[1:], strict=True):
        lines = "<br>".join(escape(line) for line in cell.split("\n"))
        cells.append(f"<td{' class=text' if column.is_text else ''}>{lines}</td>")
    return "".join(cells)


def _table(caption: str, columns: Sequence[Column], body: str) -> str:
    heads = "".join(f'<th scope="col"{" class=text" if c.is_text else ""}>{escape(c.title)}</th>' for c in columns)
    return (
        f'<div class="box" tabindex="0" role="region" aria-label="{escape(caption)}">\n<table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{heads}</tr></thead>\n{body}\n</table>\n</div>"
    )


def details(summary: str, *parts: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>\n" + "\n".join(parts) + "\n</details>"


def page(title: str, *parts: str) -> str:
    """The whole page."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )
