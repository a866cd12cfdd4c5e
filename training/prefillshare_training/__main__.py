"""``python -m prefillshare_training``: `prefillshare train` for ``accelerate launch``."""

from __future__ import annotations

import sys

from prefillshare_server.cli import main

if __name__ == "__main__":
    sys.argv[1:] = ["train", *sys.argv[1:]]
    main()
