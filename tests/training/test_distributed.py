"""Two processes (gloo, CPU) train what one does: data parallel, and sharded with FSDP2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from prefillshare_training.settings import LoraSettings
from prefillshare_training.train import train
from tests.training.runs import LORA, require_equal, settings

ROOT = Path(__file__).parents[2]
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def launch(run: Path, env: dict[str, str]) -> str:
    """Train in two processes; returns their output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "tests.training.distributed_worker", str(run)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("env", [{}, FSDP], ids=["ddp", "fsdp2"])
def test_two_processes_train_what_one_does(
    base_dir: Path, tmp_path: Path, env: dict[str, str], lora: LoraSettings | None
) -> None:
    alone = settings(base_dir, tmp_path, out=tmp_path / "alone", lora=lora)
    train(alone, Console(quiet=True))
    together = settings(base_dir, tmp_path, lora=lora, accumulation=2)
    file = tmp_path / "run.json"
    file.write_text(together.model_dump_json())
    output = launch(file, env)
    found = re.findall(r"sharded (\d+) of (\d+)", output)
    assert len(found) == 2
    for sharded, parameters in found:
        assert int(sharded) == (int(parameters) if env else 0)
    require_equal(together.out, alone.out, tolerance=1e-5)


def test_a_signal_to_one_process_stops_all_after_the_same_step(
    base_dir: Path, tmp_path: Path
) -> None:
    """Else the others wait for it in their next step."""
    file = tmp_path / "run.json"
    file.write_text(settings(base_dir, tmp_path, accumulation=2).model_dump_json())
    output = launch(file, {"STOP_FIRST_PROCESS_AFTER": "2"})
    assert output.count("stopped after step 2 of 8") == 2
