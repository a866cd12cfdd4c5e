"""Which adapters a router lets speak for a role. The workers themselves: tests/lora."""

import asyncio
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from prefillshare_server.config import LORA_POOL, Cluster, LayoutSettings
from prefillshare_server.models.layout import Layout
from prefillshare_server.models.provenance import Provenance, base_fingerprint
from prefillshare_server.router.errors import RouterError, WorkerRefused, timed_out
from prefillshare_server.router.placement import Placement
from prefillshare_server.router.roles import Roles
from prefillshare_server.router.topology import Decoder, WorkerEndpoint
from tests.adapters import write_adapter


@pytest.fixture
def base(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tiny_home))
    return tiny_home / "models" / "tiny-base"


@pytest.fixture
def adapter(tiny_adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))


class FakeWorkers:
    """Workers that load adapters, or do not."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, str]] = []
        self.errors: dict[str, RouterError] = {}
        self.loading = asyncio.Event()
        self.loading.set()

    async def json(self, method: str, worker: WorkerEndpoint, path: str, **call: Any) -> None:
        assert (method, path) == ("POST", "/prefillshare/adapters")
        await self.loading.wait()
        if worker.id in self.errors:
            raise self.errors[worker.id]
        self.loaded.append((worker.id, call["body"]["name"]))


class FakeHealth:
    """All workers take calls but those in `away`."""

    def __init__(self) -> None:
        self.away: set[str] = set()
        self.failures: list[str] = []

    def available(self, worker_id: str) -> bool:
        return worker_id not in self.away

    def why_not(self, worker_id: str) -> str:
        return "killed"

    def failed(self, worker: WorkerEndpoint, error: RouterError) -> None:
        self.failures.append(worker.id)


def roles_of(
    base: Path,
    *,
    pools: tuple[str, ...] = (LORA_POOL,),
    workers: FakeWorkers | None = None,
    health: FakeHealth | None = None,
    **settings: Any,
) -> Roles:
    """The role `planner`, in a cluster with two workers for each of `pools`."""
    cluster = Cluster.model_validate(
        {
            "base": {"model": str(base)},
            "roles": {"planner": {"model": str(base)}},
            "lora": {"max_lora_rank": 8},
            **settings,
        }
    )
    replicas = [
        WorkerEndpoint(f"{pool}-{n}", "decode", pool, "http://w", "base")
        for pool in pools
        for n in (0, 1)
    ]
    if cluster.prefill.pool == "per_role":
        replicas.append(WorkerEndpoint("prefill-planner-0", "prefill", "planner", "http://w", "b"))
    health = health or FakeHealth()
    return Roles(
        cluster,
        base,
        {"planner": Decoder(pools[0], "base")},
        Placement(replicas, Counter(), available=health.available, affinity="soft"),
        cast(Any, health),
        cast(Any, workers or FakeWorkers()),
    )


async def refused(roles: Roles, name: str, **body: Any) -> RouterError:
    with pytest.raises(RouterError) as caught:
        await roles.set(name, json.dumps(body).encode())
    return caught.value


def trained_for(base: Path, adapter: Path, layout: LayoutSettings) -> None:
    Provenance(
        method="prefillshare",
        base="tiny-base",
        base_fingerprint=base_fingerprint(base),
        layout_fingerprint=Layout.for_model(base, layout).fingerprint,
        data={"source": "rows.jsonl", "sha256": "0" * 64, "samples": 3},
        hyperparameters={},
        evaluation=(),
        versions={},
    ).write(adapter)


async def test_an_adapter_that_was_not_trained_for_the_base_is_refused(
    base: Path, adapter: Path
) -> None:
    roles = roles_of(base)
    error = await refused(roles, "planner", adapter=str(adapter))
    assert (error.status, error.param) == (400, "adapter")
    assert "prefillshare.json" in error.message
    assert roles.decoders == {"planner": Decoder(LORA_POOL, "base")}


async def test_an_adapter_that_was_trained_with_another_layout_is_refused(
    base: Path, adapter: Path
) -> None:
    trained_for(base, adapter, LayoutSettings(tail_role="user"))
    error = await refused(roles_of(base), "planner", adapter=str(adapter))
    assert (error.status, error.param) == (400, "adapter")
    assert "layout" in error.message


async def test_an_adapter_that_was_trained_for_both_is_taken(base: Path, adapter: Path) -> None:
    trained_for(base, adapter, LayoutSettings())
    roles = roles_of(base)
    card = await roles.set("planner", json.dumps({"adapter": str(adapter)}).encode())
    assert card["adapter"] == str(adapter)
    assert roles.decoders["planner"] == Decoder(LORA_POOL, card["decoder"])
    assert card["decoder"].startswith("adapter-")


@pytest.mark.parametrize("by", ["body", "cluster"])
async def test_an_untrained_adapter_may_be_allowed(base: Path, adapter: Path, by: str) -> None:
    roles = roles_of(base, allow_untrained=by == "cluster")
    body = {"adapter": str(adapter), "allow_untrained": by == "body"}
    card = await roles.set("new", json.dumps(body).encode())
    assert set(roles.decoders) == {"planner", "new"}
    assert [each["id"] for each in roles.report()] == ["planner", "new"]
    assert roles.report()[1] == card


async def test_without_workers_that_adapters_share_no_role_changes(
    base: Path, adapter: Path
) -> None:
    roles = roles_of(base, pools=("planner",))
    error = await refused(roles, "new", adapter=str(adapter))
    assert (error.status, error.code) == (409, "conflict")
    assert "`lora: {}`" in error.message
    with pytest.raises(RouterError, match="role 'planner' has workers of its own"):
        await roles.remove("planner")


async def test_a_role_comes_back_with_another_adapter(base: Path, adapter: Path) -> None:
    """And no role is told of the adapter that a removed one had."""
    roles = roles_of(base, allow_untrained=True)
    body = json.dumps({"adapter": str(adapter)}).encode()
    first = await roles.set("planner", body)
    await roles.remove("planner")
    assert dict(roles.decoders) == {}
    assert await roles.set("planner", body) == first


REFUSED = WorkerRefused("lora-1", 400, {"error": {"message": "it is broken"}})
FAILED = WorkerRefused("lora-1", 500, {"error": {"message": "it is dead"}})
SILENT = timed_out("decode", "lora-1", 60)


@pytest.mark.parametrize(
    ("error", "status", "message", "failures"),
    [
        (REFUSED, 400, "lora-1 cannot serve it: it is broken", []),
        (FAILED, 502, "worker lora-1 failed in decode: it is dead", []),
        (SILENT, 504, "did not load the adapter within 60 s; the role is as it was", ["lora-1"]),
    ],
    ids=["refused", "failed", "silent"],
)
async def test_a_role_is_as_it_was_where_a_worker_does_not_load(
    base: Path,
    adapter: Path,
    error: RouterError,
    status: int,
    message: str,
    failures: list[str],
) -> None:
    workers, health = FakeWorkers(), FakeHealth()
    workers.errors["lora-1"] = error
    roles = roles_of(base, workers=workers, health=health, allow_untrained=True)
    told = await refused(roles, "planner", adapter=str(adapter))
    assert told.status == status
    assert message in told.message
    assert health.failures == failures
    assert roles.decoders == {"planner": Decoder(LORA_POOL, "base")}


async def test_workers_that_are_away_load_when_they_are_asked(base: Path, adapter: Path) -> None:
    workers, health = FakeWorkers(), FakeHealth()
    roles = roles_of(base, workers=workers, health=health, allow_untrained=True)
    health.away = {"lora-0"}
    card = await roles.set("planner", json.dumps({"adapter": str(adapter)}).encode())
    assert workers.loaded == [("lora-1", card["decoder"])]
    health.away = {"lora-0", "lora-1"}
    told = await refused(roles, "new", adapter=str(adapter))
    assert (told.status, told.code) == (503, "no_worker")
    assert "lora-0: killed; lora-1: killed" in told.message
    assert set(roles.decoders) == {"planner"}


async def test_changes_happen_in_the_order_in_which_they_came(base: Path, adapter: Path) -> None:
    """Also if the first one takes longer."""
    workers = FakeWorkers()
    roles = roles_of(base, workers=workers, allow_untrained=True)
    workers.loading.clear()
    body = json.dumps({"adapter": str(adapter)}).encode()
    setting = asyncio.create_task(roles.set("planner", body))
    await asyncio.sleep(0)
    removing = asyncio.create_task(roles.remove("planner"))
    await asyncio.sleep(0.05)
    assert set(roles.decoders) == {"planner"}
    workers.loading.set()
    await setting
    await removing
    assert dict(roles.decoders) == {}


@pytest.mark.parametrize("reference", ["x" * 5000, "/" + "x" * 5000])
async def test_a_path_that_no_file_system_has_is_refused(base: Path, reference: str) -> None:
    told = await refused(roles_of(base), "planner", adapter=reference)
    assert (told.status, told.param) == (400, "adapter")


async def test_the_rank_that_workers_were_started_with_is_the_limit(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    """Whatever has become of the folders of the start."""
    start = shutil.copytree(adapter, tmp_path / "start")
    roles = roles_of(
        base,
        allow_untrained=True,
        roles={"planner": {"adapter": str(start)}},
        lora={"max_lora_rank": None},
    )
    shutil.rmtree(start)
    wide = write_adapter(base, tmp_path / "wide", rank=16)
    told = await refused(roles, "planner", adapter=str(wide))
    assert "has rank 16, these workers take ranks up to 8" in told.message
    await roles.set("planner", json.dumps({"adapter": str(adapter)}).encode())


async def test_with_a_prefill_pool_per_role_only_roles_of_the_cluster_file_can_be_set(
    base: Path, adapter: Path
) -> None:
    roles = roles_of(base, prefill={"pool": "per_role"}, allow_untrained=True)
    error = await refused(roles, "critic", adapter=str(adapter))
    assert (error.status, error.code) == (409, "conflict")
    assert "prefill.pool is per_role and role 'critic' has no prefill workers" in error.message
    card = await roles.set("planner", json.dumps({"adapter": str(adapter)}).encode())
    assert card["id"] == "planner"
