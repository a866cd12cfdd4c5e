"""The reference of the SDK: one page for each public package, one entry for each public name."""

import importlib
from collections.abc import Iterator
from importlib.util import find_spec

from scripts.docs.markdown import page

PACKAGES = {
    "prefillshare_agents": "Clients and sessions",
    "prefillshare_agents.langgraph": "LangGraph and LangChain",
    "prefillshare_agents.testing": "Testing",
    "prefillshare_prefix": "Prefix breaks",
}
"""Public packages and the titles of their pages; those that are not there have no page."""

INHERITED = {"Session", "AsyncSession", "SessionUsage", "SessionTotals"}
"""Classes whose parents in this package are private, so that what they inherit belongs here."""


def sdk_pages() -> Iterator[tuple[str, str, str]]:
    """Path in the site, title and text of each page."""
    for package, title in PACKAGES.items():
        if find_spec(package) is not None:
            yield f"reference/sdk/{package}.md", title, _sdk_page(package, title)


def _sdk_page(package: str, title: str) -> str:
    module = importlib.import_module(package)
    entries = [_entry(package, name) for name in module.__all__]
    return page(f"# {title}", f"`from {package} import …`", *entries)


def _entry(package: str, name: str) -> str:
    inherited = "true" if name in INHERITED else "false"
    return f"::: {package}.{name}\n    options:\n      inherited_members: {inherited}"
