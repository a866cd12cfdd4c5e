"""The model runner's part in an answer that goes on: sampling is where it was.

vLLM's V1 runner (CPU, and GPU unless it chooses V2) believes that a new request has generated
nothing. Penalties, min_tokens, bad words and the seed's position depend on what it has. The V2
runner is told by vLLM itself (`NewRequestData.prefill_token_ids`); it was not run here.
"""

import torch

from prefillshare_server.vllm_plugin.handoff import generated_ids

_MOST_DRAWS = 1_000_000
"""More than any answer has tokens."""

_OFFSET_PER_DRAW = 4
"""By how much sampling one token moves a GPU generator; vLLM assumes the same."""


def install_resumed_state() -> None:
    """Give the V1 runner of this process requests that know their answer so far. Idempotent."""
    from vllm.v1.worker import gpu_model_runner as runner

    if getattr(runner.CachedRequestState, "prefillshare", False):
        return

    class ResumedState(runner.CachedRequestState):
        prefillshare = True
        generator: torch.Generator | None

        def __post_init__(self) -> None:
            super().__post_init__()
            begun = generated_ids(self.sampling_params)
            if begun:
                self.output_token_ids = list(begun)
            if self.generator is not None:
                self.generator = advanced(self.generator, self.sampling_params.seed, len(begun))

    runner.CachedRequestState = ResumedState


def advanced(generator: torch.Generator, seed: int, draws: int) -> torch.Generator:
    """The generator after sampling `draws` tokens with `seed`, as vLLM's samplers do.

    CPU: `TopKTopPSampler.forward_cpu` draws one seed for the noise of each token.
    """
    if generator.device.type != "cpu":
        generator.set_offset(generator.get_offset() + _OFFSET_PER_DRAW * draws)
        return generator
    started = Rewindable()
    started.manual_seed(seed)
    for _ in range(draws):
        _draw(started)
    started.known = started.get_state()
    return started


class Rewindable(torch.Generator):
    """A CPU generator that vLLM can take a draw back from.

    vLLM samples after every chunk of a prompt, and of what it computes again after a preemption,
    and takes all draws but the last back, by moving the offset, which CPU generators do not have:
    the engine would die.
    """

    known: torch.Tensor
    """A state from which not more draws lead to the present one than an answer has tokens."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Take the last draw back."""
        present, shadow = self.get_state(), torch.Generator()
        shadow.set_state(self.known)
        for _ in range(_MOST_DRAWS):
            before = shadow.get_state()
            _draw(shadow)
            if torch.equal(shadow.get_state(), present):
                self.known = before
                self.set_state(before)
                return
        raise RuntimeError("prefillshare: a draw that was never made cannot be taken back")


def _draw(generator: torch.Generator) -> None:
    torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
