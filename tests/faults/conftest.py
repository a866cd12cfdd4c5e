"""The base the router of these tests renders for."""

from tests.router.conftest import base_dir

__all__ = ["base_dir"]
