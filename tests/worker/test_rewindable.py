"""A CPU generator that vLLM can take draws back from, as from a GPU's."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from prefillshare_server.vllm_plugin.resumed_state import advanced


def drawn(generator: torch.Generator) -> int:
    """What `TopKTopPSampler.forward_cpu` draws for a token."""
    return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))


@given(
    seed=st.integers(0, 2**63 - 1),
    begun=st.integers(0, 40),
    kept=st.lists(st.booleans(), max_size=60),
)
def test_only_the_draws_that_were_kept_count(seed: int, begun: int, kept: list[bool]) -> None:
    """Chunks of a prompt, before or after a preemption, draw and take it back; tokens do not."""
    plain = torch.Generator()
    plain.manual_seed(seed)
    for _ in range(begun):
        drawn(plain)
    generator = advanced(torch.Generator(), seed, begun)
    for keep in kept:
        found = drawn(generator)
        if keep:
            assert found == drawn(plain)
        else:
            generator.set_offset(generator.get_offset() - 4)
    assert drawn(generator) == drawn(plain)
