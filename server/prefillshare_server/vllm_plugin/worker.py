"""One vLLM worker: `python -m prefillshare_server.vllm_plugin.worker <vLLM server arguments>`."""

import os

from prefillshare_server.vllm_plugin import require_supported_vllm
from prefillshare_server.vllm_plugin.lifetime import die_with_parent

LAUNCHER_PID_ENV = "PREFILLSHARE_LAUNCHER_PID"


def main() -> None:
    """Run vLLM's OpenAI server until it is told to stop or the launcher ends."""
    launcher = os.environ.get(LAUNCHER_PID_ENV)
    die_with_parent(int(launcher) if launcher else None)
    require_supported_vllm()
    from vllm.entrypoints.launchers.api_server import entry

    entry.main()


# vLLM starts its engine with `spawn`, which imports this module again in the child.
if __name__ == "__main__":
    main()
