"""What mkdocs cannot do by itself.

Addresses from one file, formulas as MathML, tables and pictures on narrow screens, and `llms.txt`.

Pages may link to files outside of `docs/`, such as `../../examples/ppo.py`, for readers of the repository.
"""

import html
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

DOCS = Path(__file__).parent
BLOCK = re.compile(
    r'<div class="highlight"><pre><span></span><code>([^<]*)</code></pre></div>'
)
BARS = re.compile(r"<!-- bars -->\s*(<table>.*?</table>)", re.DOTALL)
NUMBER = re.compile(r"<td>(\d+\.\d+)</td>")
OUTSIDE = re.compile(r"\[([^\[\]]+)\]\(((?:\.\./)+)(?!\.)([\w./]+)\)")
# On narrow screens, tables with a longer cell or heading after the first column become blocks of rows,
# and tables with many columns get smaller letters.
LONG_CELL = 34  # characters
MANY_COLUMNS = 6
NARROW = 720  # pixels of a picture whose text is large enough for a narrow screen


def read_addresses() -> dict[str, Any]:
    """The content of `addresses.toml`."""
    return tomllib.loads((DOCS.parent / "addresses.toml").read_text(encoding="utf-8"))


def on_config(config: Any) -> None:
    """Take the addresses of the pages and of the repository from `addresses.toml`."""
    set_addresses(config, read_addresses())


def set_addresses(config: Any, addresses: dict[str, Any]) -> None:
    """Leave out what is not known."""
    if documentation := addresses.get("documentation"):
        config.site_url = documentation.rstrip("/") + "/"
    if repository := addresses.get("repository"):
        config.repo_url = repository.rstrip("/") + "/"
        config.repo_name = "/".join(repository.rstrip("/").split("/")[-2:])
        config.edit_uri = f"edit/{addresses['branch']}/docs/"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called with the Markdown of a page. A recipe has no table of contents, so that its program has room."""
    if page.file.src_uri.startswith("recipes/"):
        page.meta["hide"] = ["toc"]
    if page.file.src_uri == "index.md":
        markdown = home()
    return with_outside_links(markdown, page.file.src_uri, read_addresses())


def home() -> str:
    """The README up to its commands, with links between pages."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    return readme.partition("\n## Try it\n")[0].replace("](docs/", "](")


def with_outside_links(markdown: str, src_uri: str, addresses: dict[str, Any]) -> str:
    """Replace links to files outside of `docs/` by links to the repository; without its address, by their words."""

    def replaced(match: re.Match[str]) -> str:
        words, up, path = match.groups()
        if up.count("..") <= src_uri.count("/"):
            return match[0]
        if repository := addresses.get("repository"):
            return (
                f"[{words}]({repository.rstrip('/')}/blob/{addresses['branch']}/{path})"
            )
        return words

    return OUTSIDE.sub(replaced, markdown)


def on_post_build(config: Any) -> None:
    """Write `llms.txt` beside the pages: what each of them is about, for programs that read instead of people."""
    target = Path(config.site_dir, "llms.txt")
    target.write_text(llms(config.nav, config.site_url or "/"), encoding="utf-8")


def llms(nav: list[Any], address: str) -> str:
    """What the README says first, and the title and the first sentence of each page, by sections."""
    title, first, *_ = home().split("\n\n")
    lines = [title, "", f"> {first}"]
    for section in nav:
        ((name, entries),) = section.items()
        lines += ["", f"## {name}", ""]
        lines += [described(path, address) for path in pages_of(entries)]
    return "\n".join(lines) + "\n"


def pages_of(entries: list[Any]) -> list[str]:
    """The pages of a section and of the sections in it."""
    paths: list[str] = []
    for entry in entries:
        ((_, below),) = entry.items()
        paths += [below] if isinstance(below, str) else pages_of(below)
    return paths


def described(path: str, address: str) -> str:
    """A line with the address of a page, its title and its first sentence."""
    text = home() if path == "index.md" else (DOCS / path).read_text(encoding="utf-8")
    title = (
        text.partition("\n")[0].removeprefix("# ")
        if text[0] == "#"
        else path.removesuffix(".md").capitalize()
    )
    paragraphs = (
        part for part in text.split("\n\n")[1:] if re.match(r"\w|`(?!``)", part)
    )
    sentence = re.split(r"(?<=[.:])\s", next(paragraphs, ""))[0].rstrip(".:")
    said = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(sentence.split()))
    place = "" if path == "index.md" else f"{path.removesuffix('.md')}/"
    return f"- [{title}]({address}{place}){f': {said}' if said else ''}"


def on_page_content(content: str, **_: Any) -> str:
    """Called with the HTML of a page."""
    return with_open_pictures(with_narrow_tables(with_bars(with_formulas(content))))


def normalized(text: str) -> str:
    """The lines of a block without what only aligns them."""
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.strip().split("\n"))
    return "\n".join(line for line in lines if line)


def formulas() -> dict[str, str]:
    """The LaTeX of each block of a docstring."""
    entries = tomllib.loads((DOCS / "formulas.toml").read_text(encoding="utf-8"))[
        "formula"
    ]
    return {normalized(entry["text"]): entry["latex"].strip() for entry in entries}


def typeset(latex: str) -> str:
    """The HTML of lines of LaTeX, each with an optional remark."""
    lines: list[str] = []
    for line in latex.split("\n"):
        formula, _, remark = (part.strip() for part in line.partition("%"))
        math = convert(upright(formula)) if formula else ""
        said = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(remark, quote=False))
        lines.append(f"<p>{math}{f' <span>{said}</span>' if said else ''}</p>")
    return f'<div class="formula">{"".join(lines)}</div>'


def upright(latex: str) -> str:
    """LaTeX with its words marked as text, except the words of commands."""
    parts = re.split(r"(\\text{[^}]*}|\\[A-Za-z]+)", latex)
    return "".join(
        part if part.startswith("\\") else re.sub(r"[A-Za-z]\w+", word, part)
        for part in parts
    )


def word(match: re.Match[str]) -> str:
    """One letter with an index, such as `c_i`, is no word."""
    return match[0] if re.fullmatch(r"[A-Za-z]_\w", match[0]) else rf"\text{{{match[0]}}}"


def with_formulas(content: str) -> str:
    """Replace the blocks of docstrings that have LaTeX."""
    latex_by_text = formulas()

    def replaced(match: re.Match[str]) -> str:
        latex = latex_by_text.get(normalized(html.unescape(match[1])))
        return match[0] if latex is None else typeset(latex)

    return BLOCK.sub(replaced, content)


def with_bars(content: str) -> str:
    """Draw a bar in each cell with a number, and a line at 1, in tables after the comment `bars`."""

    def replaced(match: re.Match[str]) -> str:
        most = max(float(number) for number in NUMBER.findall(match[1]))
        return NUMBER.sub(
            lambda cell: (
                f'<td class="bar" style="--share: {float(cell[1]) / most:.1%}; '
                f'--one: {1 / most:.1%}">{cell[1]}</td>'
            ),
            match[1],
        )

    return BARS.sub(replaced, content)


def with_open_pictures(content: str) -> str:
    """Let each picture open in full size, except those of tables.

    On narrow screens, a wide picture is replaced by `NAME_narrow.png` if there is one, and scrolls otherwise.
    """

    def replaced(match: re.Match[str]) -> str:
        picture, address = match.groups()
        file = DOCS / "img" / Path(address).name
        if file.with_stem(f"{file.stem}_narrow").exists():
            narrow = address.removesuffix(file.suffix) + f"_narrow{file.suffix}"
            source = f'<source media="(max-width: 44.98em)" srcset="{narrow}">'
            picture, fits = f"<picture>{source}{picture}</picture>", " fits"
        else:
            fits = " fits" if width_of(file) <= NARROW else ""
        return f'<a class="picture{fits}" href="{address}">{picture}</a>'

    return re.sub(r'(?<!<td>)(<img [^>]*src="([^"]+)"[^>]*>)', replaced, content)


def width_of(picture: Path) -> float:
    """The width of a PNG in pixels; inf for other files."""
    is_png = picture.suffix == ".png" and picture.exists()
    return int.from_bytes(picture.read_bytes()[16:20], "big") if is_png else math.inf


def with_narrow_tables(content: str) -> str:
    """Mark the tables whose rows become blocks on narrow screens, and give each cell the heading of its column."""

    def replaced(match: re.Match[str]) -> str:
        table = match[0]
        rows = [
            re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
            for row in table.split("</tr>")
        ]
        lengths = [
            len(html.unescape(re.sub(r"<[^>]+>", "", cell)))
            for row in rows
            for cell in row[1:]
        ]
        cells = re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)
        headings = [html.unescape(re.sub(r"<[^>]+>", "", text)).strip() for text in cells]
        if max([*lengths, *map(len, headings[1:])], default=0) < LONG_CELL:
            small = '<table data-narrow="small">'
            return (
                table.replace("<table>", small, 1)
                if len(cells) >= MANY_COLUMNS
                else table
            )
        return re.sub(
            r"<tr>(.*?)</tr>",
            lambda row: labelled(row[0], headings),
            table,
            flags=re.DOTALL,
        ).replace("<table>", '<table data-narrow="rows">', 1)

    return re.sub(r"<table>.*?</table>", replaced, content, flags=re.DOTALL)


def labelled(row: str, headings: list[str]) -> str:
    """A row whose cells know the headings of their columns."""
    names = iter(headings)
    return re.sub(
        r"<td(?=[ >])", lambda _: f'<td data-label="{html.escape(next(names, ""))}"', row
    )
