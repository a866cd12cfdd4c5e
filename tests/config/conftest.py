"""A store with the tiny family, and cluster files that use it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from prefillshare_server.models import store, tiny

WriteCluster = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the whole tiny family is built, apart from the user's own."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFILLSHARE_HOME", str(home))
        for name in tiny.FAMILY:
            store.build(name)
    return home


@pytest.fixture
def write_cluster(tmp_path: Path) -> WriteCluster:
    """Writes cluster.yaml from its text and gives its path."""

    def write(text: str) -> Path:
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return path

    return write
