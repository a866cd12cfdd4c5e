"""Which adapters a router lets speak for a role. The workers themselves: tests/lora."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prefillshare_server.config import LORA_POOL, Cluster, LayoutSettings
from prefillshare_server.models.layout import Layout
from prefillshare_server.models.provenance import Provenance, base_fingerprint
from prefillshare_server.router.errors import RouterError
from prefillshare_server.router.roles import Roles
from prefillshare_server.router.topology import Decoder


@pytest.fixture
def base(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tiny_home))
    return tiny_home / "models" / "tiny-base"


@pytest.fixture
def adapter(tiny_adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))


def roles_of(base: Path, *, pools: tuple[str, ...] = (LORA_POOL,), **settings: Any) -> Roles:
    """The role `planner`, in a cluster whose workers are all away."""
    cluster = Cluster.model_validate(
        {
            "base": {"model": str(base)},
            "roles": {"planner": {"model": str(base)}},
            "lora": {"max_lora_rank": 8},
            **settings,
        }
    )
    placement = SimpleNamespace(decode=dict.fromkeys(pools, ()))
    decoders = {"planner": Decoder(pools[0], "base")}
    none = cast(Any, None)
    return Roles(cluster, base, decoders, cast(Any, placement), none, none)


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
        roles.remove("planner")


async def test_a_role_comes_back_with_another_adapter(base: Path, adapter: Path) -> None:
    """And no role is told of the adapter that a removed one had."""
    roles = roles_of(base, allow_untrained=True)
    body = json.dumps({"adapter": str(adapter)}).encode()
    first = await roles.set("planner", body)
    roles.remove("planner")
    assert dict(roles.decoders) == {}
    assert await roles.set("planner", body) == first
