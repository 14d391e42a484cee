"""The parts of an HTML page that loads no other files. Texts are escaped here."""

import base64
from collections.abc import Sequence
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
figure img { min-width: 60rem; width: 100%; height: auto; border-radius: .3rem; }
input:checked ~ .box img { width: auto; }
figcaption { color: var(--soft); font-size: .9rem; }
.box { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; max-width: calc(100vw - 3rem); }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid var(--line); }
"""


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def section(name: str, title: str, *parts: str) -> str:
    """A part of the page with a heading and an anchor for links."""
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n' + "\n".join(parts) + "\n</section>"


def code(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>"


def picture(name: str, png: bytes, alt: str, caption: str) -> str:
    """A picture that scrolls in narrow windows, so that its text stays readable, and that opens in full size."""
    data = base64.b64encode(png).decode()
    return (
        f'<figure><input type="checkbox" id="{name}-full"><label for="{name}-full">Full size</label>\n'
        f'<div class="box" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<img src="data:image/png;base64,{data}" alt="{escape(alt)}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the rows."""
    heads = "".join(f'<th scope="col">{escape(title)}</th>' for title in columns)
    body = "\n".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return (
        f'<div class="box" tabindex="0" role="region" aria-label="{escape(caption)}">\n<table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _cells(row: Sequence[str]) -> str:
    first, *others = (escape(cell).replace("\n", "<br>") for cell in row)
    return f'<th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in others)


def page(title: str, *parts: str) -> str:
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )
