"""The cluster file: what it means, who overrides whom, and what its errors say."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from prefillshare_server.config import Cluster
from prefillshare_server.errors import ConfigError
from tests.config.conftest import WriteCluster

MINIMAL = "base: {model: tiny-base}\nroles: {planner: {model: tiny-a}}\n"


def complaint(path: Path, **overrides: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Cluster.load(path, overrides)
    return str(caught.value)


def test_base_and_one_role_make_a_cluster(write_cluster: WriteCluster) -> None:
    cluster = Cluster.load(write_cluster(MINIMAL))

    assert cluster.base.name == "base"
    assert cluster.prefill.replicas == 1
    assert cluster.roles["planner"].model == "tiny-a"
    assert (cluster.router.host, cluster.router.port) == ("127.0.0.1", 8000)
    assert (cluster.kv.lease_s, cluster.kv.block_size, cluster.kv.blocks) == (120, None, None)
    assert cluster.layout.kind == "context-first"
    assert cluster.dtype == "auto"


def test_overrides_win_over_environment_over_file(
    write_cluster: WriteCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_cluster(MINIMAL + "router: {port: 1}\nkv: {lease_s: 11}\ntimeouts: {start_s: 1}\n")
    monkeypatch.setenv("PREFILLSHARE_ROUTER__PORT", "2")
    monkeypatch.setenv("PREFILLSHARE_KV__LEASE_S", "22")

    cluster = Cluster.load(path, {"router.port": 3})

    assert (cluster.router.port, cluster.kv.lease_s, cluster.timeouts.start_s) == (3, 22, 1)


def test_the_environment_reaches_every_depth(
    write_cluster: WriteCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFILLSHARE_DTYPE", "float32")
    monkeypatch.setenv("PREFILLSHARE_ROLES__PLANNER__REPLICAS", "3")
    monkeypatch.setenv("PREFILLSHARE_PREFILL__ARGS__MAX_NUM_SEQS", "8")
    monkeypatch.setenv("PREFILLSHARE_HOME", "/somewhere")

    cluster = Cluster.load(write_cluster(MINIMAL))

    assert cluster.dtype == "float32"
    assert cluster.roles["planner"].replicas == 3
    assert cluster.prefill.args == {"max-num-seqs": 8}


def test_overrides_know_names_with_dots(write_cluster: WriteCluster) -> None:
    path = write_cluster(MINIMAL.replace("planner", "v1.5"))

    cluster = Cluster.load(path, {"roles.v1.5.args.limit.image": 0, "roles.critic.model": "tiny-b"})

    assert cluster.roles["v1.5"].args == {"limit.image": 0}
    assert cluster.roles["critic"].model == "tiny-b"


def test_directories_are_taken_from_the_folder_of_the_file(
    write_cluster: WriteCluster, tmp_path: Path
) -> None:
    (tmp_path / "planner").mkdir()
    text = "base: {model: owner/name}\nroles: {a: {model: planner}, b: {model: ./later}}\n"

    cluster = Cluster.load(write_cluster(text))

    assert cluster.base.model == "owner/name"
    assert cluster.roles["a"].model == str(tmp_path / "planner")
    assert cluster.roles["b"].model == str(tmp_path / "later")


def test_an_adapter_is_found_from_the_folder_of_the_file(
    write_cluster: WriteCluster, tmp_path: Path
) -> None:
    text = "base: {model: b}\nroles: {a: {adapter: ./lora}, b: {adapter: owner/name}}\n"

    cluster = Cluster.load(write_cluster(text))

    assert cluster.roles["a"].decoder == ("adapter", str(tmp_path / "lora"))
    assert cluster.roles["b"].decoder == ("adapter", "owner/name")
    assert Cluster.load(write_cluster(cluster.to_yaml())) == cluster


def test_an_override_can_put_an_adapter_in_place_of_a_model(write_cluster: WriteCluster) -> None:
    path = write_cluster(MINIMAL)

    cluster = Cluster.load(path, {"roles.planner.model": None, "roles.planner.adapter": "o/n"})

    assert cluster.roles["planner"].decoder == ("adapter", "o/n")


def test_untrained_decoders_are_refused_unless_the_environment_or_file_allows_them(
    write_cluster: WriteCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not Cluster.load(write_cluster(MINIMAL)).allow_untrained
    assert Cluster.load(write_cluster(MINIMAL + "allow_untrained: true\n")).allow_untrained
    monkeypatch.setenv("PREFILLSHARE_ALLOW_UNTRAINED", "true")
    assert Cluster.load(write_cluster(MINIMAL)).allow_untrained


def test_vllm_arguments_keep_their_types(write_cluster: WriteCluster) -> None:
    args = "{max-num-seqs: 8, enforce_eager: true, seed: 1.5, allowed-origins: [a, b], q: x}"

    cluster = Cluster.load(write_cluster(MINIMAL + f"decode: {{args: {args}}}\n"))

    assert cluster.decode.args == {
        "max-num-seqs": 8,
        "enforce-eager": True,
        "seed": 1.5,
        "allowed-origins": ["a", "b"],
        "q": "x",
    }


def test_what_is_printed_loads_as_the_same_cluster(write_cluster: WriteCluster) -> None:
    text = MINIMAL + "layout: {shared_head: 'Ein Team: é'}\nprefill: {args: {a: [x]}}\n"
    cluster = Cluster.load(write_cluster(text))

    assert Cluster.load(write_cluster(cluster.to_yaml())) == cluster


def test_a_cluster_cannot_be_changed() -> None:
    cluster = Cluster.model_validate({"base": {"model": "a"}, "roles": {"r": {"model": "b"}}})

    with pytest.raises(ValidationError, match="frozen"):
        cluster.dtype = "float32"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rooter: {port: 1}", "rooter: unknown key 'rooter'; did you mean 'router'?"),
        ("kv: {leases: 1}", "kv.leases: unknown key 'leases'; did you mean 'lease_s'?"),
        (
            "kv: {zzz: 1}",
            "kv.zzz: unknown key 'zzz'; "
            "known: block_size, blocks, clock_skew_s, lease_s, reserve_tokens",
        ),
        (
            "router: {port: 70000}",
            "router.port: 70000 is not valid; expected less than or equal to 65535 (default 8000)",
        ),
        ("router: {port: x}", "router.port: 'x' is not valid; expected integer (default 8000)"),
        (
            "router: {affinity: sticky}",
            "router.affinity: 'sticky' is not valid; expected 'soft' or 'hard' (default 'soft')",
        ),
        ("kv: {block_size: 17}", "expected a multiple of 16"),
        (
            "kv: {clock_skew_s: -1}",
            "kv.clock_skew_s: -1 is not valid; expected greater than or equal to 0",
        ),
        ("timeouts: {queue_s: 0}", "timeouts.queue_s: 0 is not valid; expected greater than 0"),
        ("kv: {lease_s: 6, clock_skew_s: 2}", "of lease_s 6, 6 s are kept for heartbeats"),
        ("kv: {lease_s: 5}", "kv.lease_s: 5 is not valid; expected greater than or equal to 6"),
        ("prefill: 3", "prefill: 3 is not a section; write `prefill: {…}`"),
        (
            "prefill: {args: {--seed: 1}}",
            "prefill.args: '--seed' is not an argument name; write it as 'seed'",
        ),
        (
            "prefill: {args: {seed: {a: 1}}}",
            "prefill.args: 'seed' is {'a': 1}; write a string, a number, true, false",
        ),
        ("prefill: {args: {a-b: 1, a_b: 2}}", "prefill.args: 'a-b' is given twice"),
        ("version: 2", "version: 2 is not valid; expected 1"),
        (
            "prefill: {pool: own}",
            "prefill.pool: 'own' is not valid; expected 'shared' or 'per_role'",
        ),
        ("prefill: {reuse: none}", "expected 'all_roles' or 'per_role' (default 'all_roles')"),
        ("prefill: {warm_ups: -1}", "prefill.warm_ups: -1 is not valid; expected greater than"),
        (
            "prefill: {warm_ups: 2}",
            "prefill: warm_ups is 2, but roles share their KV, so the next role finds the prompt "
            "without one; set pool or reuse to per_role, or warm_ups to 0",
        ),
        ("router: {max_sessions: 0}", "router.max_sessions: 0 is not valid; expected greater than"),
        ("router: {session_queue: -1}", "router.session_queue: -1 is not valid; expected greater"),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_remedy(
    write_cluster: WriteCluster, text: str, line: str
) -> None:
    path = write_cluster(MINIMAL + text)

    assert complaint(path).startswith(f"{path}: ")
    assert line in complaint(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("roles: {a: {model: x}}", "base: required but not set; add `base: …`"),
        ("base: {model: x}", "roles: required but not set"),
        ("base: {model: x}\nroles: {}", "roles: {} is empty; name at least one"),
        (
            "base: {model: x}\nroles: {Planner: {model: x}}",
            "roles.Planner: role name 'Planner' must be lower-case",
        ),
        (
            "base: {model: x, name: planner}\nroles: {planner: {model: x}}",
            "role name 'planner' is also the served name of the base; rename the role",
        ),
        (
            "base: {model: x}\nroles: {a: {model: x, replica: 2}}",
            "roles.a.replica: unknown key 'replica'; did you mean 'replicas'?",
        ),
        (
            "base: {model: x}\nroles: {a: {replicas: 2}}",
            "roles.a: has neither model nor adapter; add `model: …` (full weights) or `adapter: …`",
        ),
        (
            "base: {model: x}\nroles: {a: {model: x, adapter: ./y}}",
            "roles.a: has both model 'x' and adapter './y'; remove one of them",
        ),
        (
            "base: {model: x}\nroles: {a: {adapter: ./y, replicas: 2}}",
            "roles.a: has replicas and an adapter, which shares its workers; set lora.replicas",
        ),
        (
            "base: {model: x}\nroles: {a: {adapter: ./y, args: {max-num-seqs: 2}}}",
            "or merge: true to give this role workers of its own",
        ),
        (
            "base: {model: x}\nroles: {a: {model: x, merge: true}}",
            "roles.a: merge is true, but there is no adapter; remove merge",
        ),
        (
            "base: {model: x}\nroles: {lora: {model: x}, a: {adapter: ./y}}",
            "role 'lora' has the name of the workers that adapters share, which only a role",
        ),
        (
            "base: {model: x}\nroles: {prefill: {model: x}}",
            "role 'prefill' has the name of the prefill workers, which only a role with an adapter",
        ),
        (
            "base: {model: x}\nroles: {lora: {model: x}}\nlora: {}",
            "role 'lora' has the name of the workers that adapters share, which only a role",
        ),
        (
            "mode: colocated\nbase: {model: x}\nroles: {a: {adapter: ./y, merge: true}}",
            "role 'a' has merge: true, which needs workers of its own",
        ),
        (
            "mode: colocated\nbase: {model: x}\nroles: {a: {adapter: ./y}}\n"
            "router: {affinity: hard}",
            "router.affinity is hard, but in mode colocated a session may move",
        ),
        (
            "mode: colocated\nbase: {model: x}\nroles: {a: {adapter: ./y}}\n"
            "prefill: {pool: per_role}",
            "prefill.pool is per_role, but mode colocated has no prefill workers; remove it",
        ),
        (
            "mode: colocated\nbase: {model: x}\nroles: {a: {adapter: ./y}}\n"
            "prefill: {reuse: per_role, warm_ups: 1}",
            "prefill.warm_ups is not 0, but mode colocated has no prefill workers; remove it",
        ),
        (
            "base: {model: x}\nroles: {a: {model: x}, prefill-a: {model: x}}\n"
            "prefill: {pool: per_role}",
            "the workers prefill-a-0, … are those of role 'a'; rename role 'prefill-a'",
        ),
        (
            "base: {model: x}\nroles:\n  a: {model: x}\n  a: {model: y}",
            ":4: not valid YAML: key 'a' is already set on line 3",
        ),
        ("base: [", "not valid YAML"),
        ("- base", "expected a mapping, got list"),
    ],
)
def test_a_wrong_shape_is_named_with_its_place_and_remedy(
    write_cluster: WriteCluster, text: str, line: str
) -> None:
    assert line in complaint(write_cluster(text))


def test_every_problem_is_reported_at_once(write_cluster: WriteCluster) -> None:
    path = write_cluster(MINIMAL + "rooter: {}\nkv: {lease_s: 0}\ndtype: int3\n")

    assert len(complaint(path).splitlines()) == 3


def test_an_error_names_the_variable_or_override_it_comes_from(
    write_cluster: WriteCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_cluster(MINIMAL)
    monkeypatch.setenv("PREFILLSHARE_ROUTRE__PORT", "1")
    monkeypatch.setenv("PREFILLSHARE_KV__LEASE_S", "1")

    lines = complaint(path, **{"router.port": "x"})

    assert "routre (environment PREFILLSHARE_ROUTRE__PORT): unknown key 'routre'" in lines
    assert "kv.lease_s (environment PREFILLSHARE_KV__LEASE_S): 1 is not valid" in lines
    assert "router.port (override router.port): 'x' is not valid" in lines


def test_an_override_below_a_scalar_is_refused(write_cluster: WriteCluster) -> None:
    path = write_cluster(MINIMAL)

    assert "dtype is 'auto', not a section" in complaint(
        write_cluster(MINIMAL + "dtype: auto\n"), **{"dtype.x": 1}
    )
    assert "roles.planner.model is 'tiny-a', not a section" in complaint(
        path, **{"roles.planner.model.x": 1}
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert complaint(tmp_path / "none.yaml") == (
        f"{tmp_path / 'none.yaml'}: cannot read the cluster file (No such file or directory); "
        "check the path"
    )
