"""Models that the tests of this folder work with."""

from pathlib import Path

import pytest

from prefillshare_server.models import tiny


@pytest.fixture(scope="session")
def tiny_models(tiny_home: Path) -> dict[str, Path]:
    """Directories of the tiny family by name."""
    return {name: tiny_home / "models" / name for name in tiny.FAMILY}
