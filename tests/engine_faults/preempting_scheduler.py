"""The scheduler that `preempting.py` gives to decode workers; it runs inside their engines."""

import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.request import Request

from prefillshare_server.vllm_plugin.scheduler import PrefillShareScheduler
from tests.engine_faults.preempting import CONTROL_ENV, Preemptions


class PreemptingScheduler(PrefillShareScheduler):
    """Preempts through vLLM's own path, between two steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._control = Path(os.environ[CONTROL_ENV])
        self._written_at = 0
        self._preemptions = Preemptions()
        self._victims: set[tuple[str, int]] = set()
        """Prompts and where their answers were to go on: one that comes back without progress, its
        last tokens lost on the way, is let go."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._read_control()
        if self._preemptions.rate:
            for request in [each for each in self.running if self._is_victim(each)]:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
        return super().schedule(*args, **kwargs)

    def _read_control(self) -> None:
        written_at = self._control.stat().st_mtime_ns
        if written_at != self._written_at:
            self._written_at = written_at
            self._preemptions = Preemptions.read(self._control)

    def _is_victim(self, request: Request) -> bool:
        ours = request.kv_transfer_params["prefillshare"]
        replayed = len(ours.get("generated_ids", ()))
        victim = (ours["prompt_digest"], replayed)
        limit = self._preemptions.preempts_at(*victim)
        if limit is None or request.num_output_tokens < limit or victim in self._victims:
            return False
        self._victims.add(victim)
        return True
