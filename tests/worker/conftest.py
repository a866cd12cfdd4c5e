"""One prefill worker and one decode worker, shared by all tests of this folder."""

import random
from collections.abc import Callable, Iterator

import pytest

from prefillshare_server.config import Cluster
from tests.worker.driver import Pair, pair_of, running

LEASE_S = 30

CLUSTER = Cluster.model_validate(
    {
        "base": {"model": "tiny-base"},
        # Few enough blocks that three long answers do not fit: see the test of preemption.
        "roles": {"solver": {"model": "tiny-a", "args": {"num-gpu-blocks-override": 40}}},
        "kv": {"lease_s": LEASE_S, "blocks": 256},
        "max_model_len": 1024,
    }
)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running(CLUSTER, tmp_path_factory.mktemp("logs")) as (workers, _):
        pair = pair_of(workers, "tiny-base", "tiny-a")
        with pair.http:
            yield pair


@pytest.fixture
def tokens(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Random token ids, different in every test and the same in every run."""
    generator = random.Random(request.node.nodeid)
    return lambda count: [generator.randrange(256) for _ in range(count)]
