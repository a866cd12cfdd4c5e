"""Pieces of Markdown that the generated pages are made of."""

from collections.abc import Iterable, Sequence


def code(text: str) -> str:
    """`text` as inline code, also inside a table."""
    # A bar would end the table's cell, inside backticks as well.
    return f"<code>{escaped(text)}</code>" if "|" in text or "`" in text else f"`{text}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown of one line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def fence(language: str, text: str) -> str:
    """A block of code."""
    return f"```{language}\n{text.strip()}\n```"


def page(*blocks: str) -> str:
    """Blocks with a blank line between them."""
    return "\n\n".join(block for block in blocks if block) + "\n"


def one_line(text: str) -> str:
    """`text` without its line breaks, and with Markdown's code marks instead of Sphinx's."""
    return " ".join(text.replace("``", "`").split())


def escaped(text: str) -> str:
    """`text` with what would be HTML, or end a cell of a table, written as entities."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;")):
        text = text.replace(character, entity)
    return text
