"""Models that the tests of this folder work with."""

from pathlib import Path

import pytest

from prefillshare_server.models import store, tiny


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the whole tiny family is built, apart from the user's own."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFILLSHARE_HOME", str(home))
        for name in tiny.FAMILY:
            store.build(name)
    return home


@pytest.fixture(scope="session")
def tiny_models(tiny_home: Path) -> dict[str, Path]:
    """Directories of the tiny family by name."""
    return {name: tiny_home / "models" / name for name in tiny.FAMILY}
