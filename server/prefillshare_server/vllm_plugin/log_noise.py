"""A line of vLLM's log that says nothing of interest, once for every call."""

import logging

_NO_CONNECTOR = "Got kv_transfer_params, but no KVConnector found"


def silence_missing_connector() -> None:
    """For engines that hand nothing off: the router tells them the prompt's token ids there."""
    logging.getLogger("vllm.v1.engine.core").addFilter(_of_interest)


def _of_interest(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NO_CONNECTOR)
