"""Links of documents that are read in the repository as well as on the site."""

import posixpath
import re
from pathlib import Path, PurePosixPath

from mkdocs.plugins import get_plugin_logger

ROOT = Path(__file__).parents[2]
LOG = get_plugin_logger("documents")

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^)\s]+)\)")
_REMOTE = re.compile(r"[a-z]+:|#|/")
_ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples/index.md",
}
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def site_path(repository_path: str) -> str | None:
    """Where a file of the repository is on the site; None if it is not there."""
    path = PurePosixPath(repository_path)
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    if path.match("examples/*/README.md") and len(path.parts) == 3:
        return f"examples/{path.parts[1]}.md"
    return _ELSEWHERE.get(repository_path)


def relinked(text: str, source: str, page: str) -> str:
    """`text` of the repository's file `source` with the links it needs as `page` of the site.

    A link to a file that the site does not have becomes the file's name. A link to one that does
    not exist is a warning, which ends a strict build.
    """

    def replaced(found: re.Match[str]) -> str:
        image, shown, target = found.groups()
        if _REMOTE.match(target):
            return found[0]
        path, mark, anchor = target.partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / there).exists():
            # Pages that are made while the site is built are in no folder.
            if not there.startswith("docs/"):
                LOG.warning("%s: the link to %s leads nowhere", source, target)
            return found[0] if there.startswith("docs/") else shown
        if (ROOT / there / "README.md").is_file():
            there = f"{there}/README.md"  # as where the repository is browsed
        where = None if (ROOT / there).is_dir() else site_path(there)
        if where is None:
            return shown if PurePosixPath(there).name in shown else f"{shown} (`{there}`)"
        address = posixpath.relpath(where, posixpath.dirname(page) or ".")
        return f"{image}[{shown}]({address}{mark}{anchor})"

    parts, end = [], 0
    for block in _FENCED.finditer(text):
        parts += [_LINK.sub(replaced, text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, _LINK.sub(replaced, text[end:])])
