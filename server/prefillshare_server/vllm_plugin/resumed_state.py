"""The model runner's part in a resumed answer: sampling goes on where it was.

vLLM's V1 runner (CPU, and GPU unless it chooses V2) believes that a new request has generated
nothing. Penalties, min_tokens, bad words and the seed's position depend on what it has. The V2
runner is told by vLLM itself (`NewRequestData.prefill_token_ids`); it was not run here.
"""

import torch

from prefillshare_server.vllm_plugin.handoff import generated_ids

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
            if begun := generated_ids(self.sampling_params):
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
    started = _CPUGenerator()
    started.manual_seed(seed)
    for _ in range(draws):
        torch.randint(0, 2**31, (1,), generator=started, dtype=torch.long)
    started.start = started.get_state()
    return started


class _CPUGenerator(torch.Generator):
    """A generator that vLLM can take a draw back from.

    vLLM samples after every chunk of a prompt and takes all draws but the last back, by moving the
    offset, which CPU generators do not have: the engine would die. Only here is a decode worker's
    request longer than one token, and so may run in chunks.
    """

    start: torch.Tensor

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Take the draw back. All that were taken back came before the first that counts."""
        self.set_state(self.start)
