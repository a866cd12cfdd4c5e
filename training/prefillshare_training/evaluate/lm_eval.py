"""The model class for lm-evaluation-harness: its tasks, on the base's KV of the context.

    lm_eval.simple_evaluate(model=PrefillShareLM("smollm2-135m-instruct", "./solver"), tasks=…)

or, as the harness's own command, which knows no classes from outside:

    python -m prefillshare_training.evaluate.lm_eval --model prefillshare
        --model_args base=smollm2-135m-instruct,decoder=./solver,mode=shared --tasks arc_easy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoTokenizer

from prefillshare_server.models import checkpoint, store
from prefillshare_training.evaluate import modes
from prefillshare_training.evaluate.engine import Engine
from prefillshare_training.samples import Turn

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_GREEDY = {"do_sample": False, "temperature": 0.0, "top_p": 1.0, "num_beams": 1}
"""Generation settings that change nothing here; any other value would."""

_Request = tuple[tuple[str, str], list[int], list[int]]


@register_model("prefillshare")
class PrefillShareLM(HFLM):
    """A base and a decoder as one model of the harness; answers are greedy.

    Every context's KV is the base's and its last token the decoder's own (N−1 rule). What the
    harness cannot do that way is an error, never the decoder alone.
    """

    def __init__(
        self,
        base: str,
        decoder: str | None = None,
        *,
        mode: str = "shared",
        dtype: Literal["auto", "float32"] = "auto",
        batch_size: int | str = 16,
        **options: Any,
    ) -> None:
        """Load the models; `mode` as in `modes.parse`, `options` as HFLM's. Raises ConfigError."""
        # The harness's command line passes text, and a device that HFLM ignores here as well.
        options.pop("device", None)
        options.pop("max_batch_size", None)
        if not str(batch_size).isdigit():
            raise ValueError(f"batch_size must be a number, not {batch_size!r}")
        base_dir = store.resolve(base)
        self.engine = Engine(
            base_dir,
            store.resolve(decoder) if decoder else None,
            mode=modes.parse(str(mode)),
            dtype=dtype,
            batch_size=int(batch_size),
        )
        """What computes everything."""
        self._stop_ids = checkpoint.stop_ids(base_dir)
        super().__init__(
            pretrained=self.engine.models.decoder,
            backend="causal",
            tokenizer=AutoTokenizer.from_pretrained(base_dir, local_files_only=True),
            batch_size=int(batch_size),
            **options,
        )

    def _model_generate(
        self,
        context: torch.Tensor,
        max_length: int,
        stop: Sequence[str],
        **generation_kwargs: Any,
    ) -> torch.Tensor:
        """`context` [rows, columns], padded on the left → [rows, columns + longest answer]."""
        mask = generation_kwargs.pop("attention_mask", torch.ones_like(context)).bool()
        generation_kwargs.pop("generation_config", None)
        for name, value in generation_kwargs.items():
            sampling_off = name in ("top_k", "top_p") and not generation_kwargs.get("do_sample")
            if not sampling_off and _GREEDY.get(name) != value:
                raise NotImplementedError(
                    f"{name}={value} is not supported; base-cache generation is greedy"
                )
        prompts = [ids[kept].tolist() for ids, kept in zip(context.cpu(), mask.cpu(), strict=True)]
        answers = self.engine.generate(
            prompts,
            max_tokens=max_length - context.shape[1],
            stop_ids=self._stop_ids | {self.eot_token_id},
            until=lambda ids: self._says_stop(ids, stop),
        )
        longest = max(len(answer.ids) for answer in answers)
        pad = self.tokenizer.pad_token_id
        said = [[*answer.ids, *[pad] * (longest - len(answer.ids))] for answer in answers]
        return torch.cat([context, torch.tensor(said, device=context.device)], dim=1)

    def _says_stop(self, ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether a stop sequence is complete; asked after every token, so only the end is read."""
        longest = max((len(each) for each in stop), default=0)
        # No token is shorter than a byte, and no character longer than four.
        tail = self.tok_decode(list(ids[-4 * longest - 1 :]))
        return any(each in tail for each in stop)

    def _loglikelihood_tokens(
        self,
        requests: list[_Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is greedy.

        A context that is too long loses its beginning, as in HFLM.
        """
        found: list[tuple[float, bool]] = []
        chunk = 16 * int(self.batch_size)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="loglikelihood") as bar:
            for start in range(0, len(requests), chunk):
                part = requests[start : start + chunk]
                scores = self.engine.score([self._turn(request) for request in part])
                for (key, _, _), score in zip(part, scores, strict=True):
                    answer = (sum(score.logprobs), score.greedy)
                    found.append(answer)
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answer)
                bar.update(len(part))
        return found

    def _turn(self, request: _Request) -> Turn:
        _, context, continuation = request
        room = self.max_length - len(continuation)
        if room < 1:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens leaves no room for a context in "
                f"{self.max_length}"
            )
        return Turn(tuple(context[-room:]), tuple(continuation))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Not defined: a text without a context has no KV to share."""
        raise NotImplementedError(
            "perplexity of whole texts (loglikelihood_rolling) has no context whose KV the base "
            "could compute; use a task with contexts, or HFLM for the decoder alone"
        )

    def _model_call(self, inps: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Never used: it cannot tell a context from its continuation."""
        raise NotImplementedError("the decoder alone does not speak here")


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
