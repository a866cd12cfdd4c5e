"""The model store: names, directories and hub ids; built once, whole or not at all."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.errors import ConfigError
from prefillshare_server.models import build_once, checkpoint, store, tiny


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store."""
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


def test_a_name_is_built_on_first_use_and_found_afterwards(home: Path) -> None:
    steps: list[str] = []

    first = store.resolve("tiny-a", progress=steps.append)
    second = store.resolve("tiny-a", progress=steps.append)

    assert first == second == home / "tiny-a"
    assert len(steps) == 1
    checkpoint.require_weights(first)


def test_a_failed_build_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, directory: Path, progress: Any) -> None:
        (directory / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    monkeypatch.setattr(tiny, "write", fail)

    with pytest.raises(RuntimeError, match="disk full"):
        store.build("tiny-a")

    assert store.path_of("tiny-a") is None
    assert [path.name for path in home.iterdir()] == [".tiny-a.lock"]


def test_a_build_that_was_killed_is_cleared_away(home: Path) -> None:
    leftover = home / ".tiny-a.abc.partial"
    leftover.mkdir(parents=True)

    store.build("tiny-a")

    assert not leftover.exists()


def test_a_model_of_an_older_recipe_is_built_again(home: Path) -> None:
    built = store.build("tiny-a")
    (built / store.RECIPE_FILE).write_text(json.dumps({"name": "tiny-a", "recipe": 0}))
    (built / "stale").touch()

    assert store.path_of("tiny-a") is None
    assert store.build("tiny-a") == built
    assert not (built / "stale").exists()


def test_of_two_processes_one_builds_and_the_other_waits(home: Path) -> None:
    code = "from prefillshare_server.models import store; store.build('tiny-a', progress=print)"
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    outputs = [process.communicate(timeout=120)[0] for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert sum("draw tiny-a from seed 2" in output for output in outputs) == 1


def test_a_lock_held_too_long_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_once, "LOCK_TIMEOUT_S", 0.1)

    with (
        build_once.locked(home / "tiny-a", build_once.silent),
        pytest.raises(ConfigError, match="another process has held"),
    ):
        store.build("tiny-a")


def test_a_removed_model_is_gone(tiny_home: Path, home: Path) -> None:
    shutil.copytree(tiny_home / "models" / "tiny-a", home / "tiny-a")

    assert store.remove("tiny-a") is True
    assert store.path_of("tiny-a") is None
    assert store.remove("tiny-a") is False


def test_a_relative_directory_is_taken_from_the_given_folder(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()

    assert store.resolve("./planner", relative_to=tmp_path) == tmp_path / "planner"
    assert store.resolve("planner", relative_to=tmp_path) == tmp_path / "planner"
    assert store.resolve(str(tmp_path / "planner")) == tmp_path / "planner"


@pytest.mark.parametrize(
    ("ref", "complaint"),
    [
        ("tiny-bse", "did you mean 'tiny-base'?"),
        ("./nowhere", "nowhere: there is no such directory; check the path"),
        ("two/slashes/more", "neither a store name, nor a directory, nor a hub id"),
    ],
)
def test_what_cannot_be_a_model_is_refused(ref: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        store.resolve(ref, relative_to=tmp_path)

    assert complaint in str(caught.value)


def test_a_hub_model_that_is_not_here_is_an_error_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(ConfigError, match=r"model some/model: cannot be downloaded from the hub"):
        store.resolve("some/model")


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, r"has no weights"),
        ({"model.safetensors": ""}, r"model.safetensors: weight file missing or empty"),
        (
            {
                "model.safetensors.index.json": json.dumps(
                    {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
                ),
                "model-1.safetensors": "x",
            },
            r"model-2.safetensors: weight file missing or empty",
        ),
    ],
    ids=["none", "empty", "a shard missing"],
)
def test_incomplete_weights_are_noticed(
    tmp_path: Path, files: dict[str, str], complaint: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    with pytest.raises(ConfigError, match=complaint):
        checkpoint.require_weights(tmp_path)
