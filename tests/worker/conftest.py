"""One prefill worker and one decode worker, shared by all tests of this folder."""

import random
from collections.abc import Callable, Iterator

import pytest

from prefillshare_server.config import Cluster
from tests.worker.driver import Pair, pair_of, running

LEASE_S = 120
"""No pause of a busy machine ends one. What is to be given back is given back long before."""

HANDOFF_S = 60

CLUSTER = Cluster.model_validate(
    {
        "base": {"model": "tiny-base"},
        "roles": {
            "solver": {
                "model": "tiny-a",
                "args": {
                    # Few enough that three long answers do not fit: see the test of preemption.
                    "num-gpu-blocks-override": 40,
                    # An answer so far that is longer is computed in chunks.
                    "max-num-batched-tokens": 64,
                    "max-num-seqs": 16,
                },
            }
        },
        "kv": {"lease_s": LEASE_S, "blocks": 256},
        "timeouts": {"handoff_s": HANDOFF_S},
        "max_model_len": 1024,
        # The tiny decoders are drawn, not trained.
        "allow_untrained": True,
    }
)


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    log_dir = tmp_path_factory.mktemp("logs")
    with running(CLUSTER, log_dir) as (workers, _):
        pair = pair_of(workers, "tiny-base", "tiny-a", log_dir)
        with pair.http:
            yield pair


@pytest.fixture
def idle(pair: Pair) -> Pair:
    """The pair with nothing left of earlier tests, some of which leave a lease to its end."""
    pair.release_all()
    pair.wait_until_idle(pair.prefill_worker)
    pair.wait_until_idle(pair.decode_worker)
    return pair


@pytest.fixture
def settled(idle: Pair) -> Iterator[None]:
    """The test ends with all blocks free, long before a lease ends, and without an error line."""
    workers = (idle.prefill_worker, idle.decode_worker)
    before = [idle.errors_logged(worker) for worker in workers]
    yield
    for worker in workers:
        idle.wait_until_idle(worker)
    assert [idle.errors_logged(worker) for worker in workers] == before


@pytest.fixture
def tokens(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Random token ids, different in every test and the same in every run."""
    generator = random.Random(request.node.nodeid)
    return lambda count: [generator.randrange(256) for _ in range(count)]
