"""What a colocated engine does not log once for every call."""

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest

from prefillshare_server.vllm_plugin import log_noise
from prefillshare_server.vllm_plugin.log_noise import silence_missing_connector


def test_only_the_line_about_the_missing_connector_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("vllm.v1.engine.core")
    before = list(logger.filters)
    silence_missing_connector()
    try:
        with caplog.at_level(logging.WARNING, logger=logger.name):
            logger.addHandler(caplog.handler)
            logger.warning(
                "Got kv_transfer_params, but no KVConnector found. Disabling KVTransfer for this "
                "request."
            )
            logger.warning("Something else")
    finally:
        logger.removeHandler(caplog.handler)
        logger.filters[:] = before
    logged = {record.getMessage() for record in caplog.records if record.name == logger.name}
    assert logged == {"Something else"}


def test_vllm_still_says_it_so() -> None:
    """When this fails, vLLM says it otherwise: change log_noise.py."""
    package = find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "v1" / "engine" / "core.py").read_text()
    assert log_noise._NO_CONNECTOR in source
