"""Decode workers that now and then preempt a running request, as a full KV cache would.

The test writes a control file that says how often. The rule is deterministic: the same prompt,
continued after the same number of tokens, meets the same fate.
"""

import json
import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from prefillshare_server.config import Cluster
from prefillshare_server.launch.plan import WorkerSpec, plan

CONTROL_ENV = "PREFILLSHARE_TEST_PREEMPTIONS"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Preemptions:
    """How many attempts to preempt, as a share, and which."""

    rate: float = 0.0
    seed: int = 0
    most_tokens: int = 8
    """New tokens of an attempt after which it is preempted at the latest."""

    @classmethod
    def read(cls, path: Path) -> "Preemptions":
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Tell the workers; it holds for their next step."""
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.rename(path)

    def preempts_at(self, prompt: str, replayed: int) -> int | None:
        """Number of output tokens at which the attempt ends, always with a new one; None: never."""
        chance = random.Random(f"{self.seed} {prompt} {replayed}")
        if chance.random() >= self.rate:
            return None
        return replayed + chance.randint(1, self.most_tokens)


def preempting_plan(control: Path) -> Callable[..., tuple[WorkerSpec, ...]]:
    """Instead of `plan`: decode workers get the scheduler of this module."""

    def planned(cluster: Cluster, *, log_dir: Path) -> tuple[WorkerSpec, ...]:
        return tuple(_preempting(spec, control) for spec in plan(cluster, log_dir=log_dir))

    return planned


def _preempting(spec: WorkerSpec, control: Path) -> WorkerSpec:
    if spec.phase == "prefill":
        return spec
    at = spec.argv.index("--scheduler-cls") + 1
    argv = (*spec.argv[:at], f"{__name__}_scheduler.PreemptingScheduler", *spec.argv[at + 1 :])
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    env = {**spec.env, "PYTHONPATH": path, CONTROL_ENV: str(control)}
    return replace(spec, argv=argv, env=env)
