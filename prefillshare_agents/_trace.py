"""Recording requests for `prefillshare lint`, where `PREFILLSHARE_TRACE` names a file."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

TRACE = "PREFILLSHARE_TRACE"

_lock = threading.Lock()


def trace(session_id: str | None, parent_id: str | None, path: str, body: Any) -> None:
    """Append one request to the file that the environment names, as a line of JSON.

    Whole lines also where several processes write the same file. Raises OSError if it cannot be
    written: a trace that silently lacks requests would be worse.
    """
    file = os.environ.get(TRACE)
    if not file:
        return
    line = json.dumps(
        {
            "time": time.time(),
            "session": session_id,
            "parent": parent_id,
            "method": "POST",
            "path": path,
            "body": body,
        },
        ensure_ascii=False,
        default=str,
    )
    data = (line + "\n").encode()
    with _lock:
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            while data:
                data = data[os.write(handle, data) :]
        finally:
            os.close(handle)
