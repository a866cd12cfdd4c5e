"""Hooks of mkdocs: pages made while the site is built, and what the pages by hand need.

mkdocs.yml names this file. The site is built from the repository's root, which is on the path then.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from prefillshare_server.router.openapi import document
from scripts.docs.causes import causes_page
from scripts.docs.cluster_file import cluster_file_page
from scripts.docs.commands import commands_page
from scripts.docs.links import ROOT, relinked, site_path
from scripts.docs.metrics import metrics_page
from scripts.docs.openapi import openapi_page
from scripts.docs.sdk import sdk_pages

_TEST_MARK = re.compile(r"^( *```\w+)[ \t]+\{.*\}[ \t]*$|^ *<!-- answers: .*? -->\n", re.MULTILINE)
"""What only the tests of the pages read: marks behind a fence, and answers for the server."""


def generated() -> dict[str, tuple[str, str]]:
    """Pages that are in no folder: path in the site → title and text."""
    pages = {
        "reference/cluster-file.md": ("Cluster file", cluster_file_page()),
        "reference/commands.md": ("Commands", commands_page()),
        "reference/metrics.md": ("Metrics", metrics_page()),
        "reference/causes.md": ("Causes of prefix breaks", causes_page()),
        "reference/openapi.md": ("OpenAPI document", openapi_page(document())),
        "contributing.md": ("Contributing", _document("CONTRIBUTING.md")),
    }
    for path, title, text in sdk_pages():
        pages[path] = (title, text)
    for readme in [ROOT / "examples" / "README.md", *sorted(ROOT.glob("examples/*/README.md"))]:
        name = str(readme.relative_to(ROOT))
        text = _document(name)
        pages[_page(name)] = (text.partition("\n")[0].removeprefix("# "), text)
    return pages


def _document(name: str) -> str:
    return relinked((ROOT / name).read_text(encoding="utf-8"), name, _page(name))


def _page(name: str) -> str:
    """Where a document of the repository is on the site."""
    page = site_path(name)
    assert page is not None
    return page


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: `reference/sdk/*` and `examples/*` stand for what there is."""
    pages = generated()
    config.nav = [_completed(entry, pages) for entry in config.nav or []]
    return config


def _completed(entry: Any, pages: dict[str, tuple[str, str]]) -> Any:
    if not isinstance(entry, dict):
        return entry
    [(title, inner)] = entry.items()
    if not isinstance(inner, list):
        return entry
    found: list[Any] = []
    for each in inner:
        if isinstance(each, str) and each.endswith("/*"):
            folder = each.removesuffix("*")
            found += [{t: path} for path, (t, _) in pages.items() if path.startswith(folder)]
        else:
            found.append(_completed(each, pages))
    return {title: found}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made now."""
    for path, (_, text) in generated().items():
        files.append(File.generated(config, path, content=text))
    # Beside the page, which has a folder of its own on the site.
    text = json.dumps(document(), indent=2)
    files.append(File.generated(config, "reference/openapi.json", content=text))
    return files


def without_marks(markdown: str) -> str:
    """A page as its readers see it."""
    return _TEST_MARK.sub(lambda found: found[1] or "", markdown)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Take out what is for the tests, and mend links that lead out of the documentation."""
    shown = without_marks(markdown)
    if page.file.generated_by is not None:
        return shown
    return relinked(shown, f"docs/{page.file.src_uri}", page.file.src_uri)
