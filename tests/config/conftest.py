"""Cluster files for the tests of this folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

WriteCluster = Callable[[str], Path]


@pytest.fixture
def write_cluster(tmp_path: Path) -> WriteCluster:
    """Writes cluster.yaml from its text and gives its path."""

    def write(text: str) -> Path:
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return path

    return write
