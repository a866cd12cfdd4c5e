"""What `check` finds before anything starts."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.check import check
from prefillshare_server.config import Cluster, LayoutSettings
from prefillshare_server.launch.plan import plan
from prefillshare_server.launch.ports import free_ports
from prefillshare_server.models.layout import Layout
from prefillshare_server.models.provenance import Provenance, base_fingerprint


@pytest.fixture(autouse=True)
def _store(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tiny_home))


@pytest.fixture
def port() -> int:
    (number,) = free_ports(1)
    return number


def cluster(port: int, **changes: Any) -> Cluster:
    roles = {"planner": {"model": "tiny-a"}, "critic": {"model": "tiny-b", "replicas": 2}}
    raw = {"base": {"model": "tiny-base"}, "roles": roles, "router": {"port": port}}
    # The tiny decoders are drawn, not trained.
    return Cluster.model_validate({**raw, "allow_untrained": True, **changes})


def lines(cluster: Cluster) -> list[str]:
    return [str(problem) for problem in check(cluster)]


@pytest.fixture
def decoder(tiny_home: Path, tmp_path: Path) -> Path:
    """A copy of tiny-a that a test may damage."""
    return Path(shutil.copytree(tiny_home / "models" / "tiny-a", tmp_path / "decoder"))


def test_a_family_that_fits_has_no_problems(port: int) -> None:
    assert check(cluster(port)) == []


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("tiny-other-geometry", "does not fit the base: num_kv_heads 4 (base 2)"),
        ("tiny-other-tokenizer", "its tokenizer is not the base's"),
    ],
)
def test_a_decoder_that_does_not_fit_is_named_once(port: int, model: str, what: str) -> None:
    roles = {"planner": {"model": "tiny-a"}, "critic": {"model": model}}

    [problem] = check(cluster(port, roles=roles))

    assert problem.where.startswith("roles.critic.model: ")
    assert problem.what == what
    assert problem.remedy


def test_another_template_of_its_own_is_a_problem(port: int, decoder: Path) -> None:
    (decoder / "chat_template.jinja").write_text("{{ messages }}")

    [line] = lines(cluster(port, roles={"critic": {"model": str(decoder)}}))

    assert "its chat template is not the base's" in line
    assert "remove its own" in line


def test_no_template_of_its_own_is_fine(port: int, decoder: Path) -> None:
    (decoder / "chat_template.jinja").unlink()

    assert check(cluster(port, roles={"critic": {"model": str(decoder)}})) == []


def test_a_decoder_without_a_tokenizer_is_a_problem(port: int, decoder: Path) -> None:
    (decoder / "tokenizer.json").unlink()

    [line] = lines(cluster(port, roles={"critic": {"model": str(decoder)}}))

    assert "has no tokenizer; if its token ids are the base's, copy" in line


def test_decoders_that_were_not_trained_for_the_base_are_problems(port: int) -> None:
    planner, critic = lines(cluster(port, allow_untrained=False))

    assert planner.startswith("roles.planner.model: ")
    assert "was not trained to read the base's KV (no prefillshare.json)" in planner
    assert "`prefillshare train --base " in planner
    assert "allow_untrained: true in the cluster file, or --allow-untrained" in planner
    assert critic.startswith("roles.critic.model: ")


def test_the_bases_own_weights_need_no_training(port: int) -> None:
    roles = {"critic": {"model": "tiny-base"}}

    assert check(cluster(port, roles=roles, allow_untrained=False)) == []


def test_a_decoder_that_does_not_fit_is_not_also_called_untrained(port: int) -> None:
    roles = {"critic": {"model": "tiny-other-geometry"}}

    [line] = lines(cluster(port, roles=roles, allow_untrained=False))

    assert "does not fit the base" in line


def test_what_is_wrong_with_an_adapter_is_found(port: int, tmp_path: Path) -> None:
    roles = {
        "full": {"adapter": "tiny-a"},
        "gone": {"adapter": str(tmp_path / "gone")},
    }

    full, gone = lines(cluster(port, roles=roles))

    assert full.startswith("roles.full.adapter: ")
    assert "is a full checkpoint, not an adapter; name it with `model:`" in full
    assert gone.startswith("roles.gone.adapter: ")
    assert "there is no such directory" in gone


@pytest.fixture
def trained(tiny_home: Path, tiny_adapter: Path, tmp_path: Path) -> Path:
    """An adapter that says that it was trained for tiny-base."""
    base = tiny_home / "models" / "tiny-base"
    trained = Path(shutil.copytree(tiny_adapter, tmp_path / "lora"))
    layout = Layout.for_model(base, LayoutSettings()).fingerprint
    Provenance("prefillshare", "tiny-base", base_fingerprint(base), layout, {}, {}, (), {}).write(
        trained
    )
    return trained


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_shares_workers_of_the_base_or_is_merged_into_it(
    port: int, tiny_home: Path, tiny_adapter: Path, trained: Path, tmp_path: Path, merge: bool
) -> None:
    def wanted(adapter: Path) -> Cluster:
        roles = {"critic": {"adapter": str(adapter), "merge": merge}}
        return cluster(port, roles=roles, allow_untrained=False)

    assert check(wanted(trained)) == []

    _, worker = plan(wanted(trained), log_dir=tmp_path)
    assert worker.name == ("critic-0" if merge else "lora-0")
    assert worker.model.parent == tiny_home / ("merged" if merge else "models")
    # The adapter is what is asked for its training, whatever has been merged from its like.
    [line] = lines(wanted(tiny_adapter))
    assert line.startswith(f"roles.critic.adapter: {tiny_adapter}: was not trained")


def test_the_base_as_a_role_needs_no_workers_beside_those_that_adapters_share(
    port: int, tiny_adapter: Path, tmp_path: Path
) -> None:
    roles = {"critic": {"adapter": str(tiny_adapter)}, "plain": {"model": "tiny-base"}}

    assert [spec.name for spec in plan(cluster(port, roles=roles), log_dir=tmp_path)] == [
        "prefill-0",
        "lora-0",
    ]


def test_a_role_with_an_adapter_may_have_the_name_of_the_shared_workers(
    port: int, tiny_adapter: Path, tmp_path: Path
) -> None:
    roles = {"lora": {"adapter": str(tiny_adapter)}, "other": {"model": "tiny-a"}}

    specs = plan(cluster(port, roles=roles), log_dir=tmp_path)

    assert [spec.name for spec in specs] == ["prefill-0", "lora-0", "other-0"]


def test_one_word_makes_it_one_engine(port: int, tiny_adapter: Path, tmp_path: Path) -> None:
    roles = {"critic": {"adapter": str(tiny_adapter)}, "plain": {"model": "tiny-base"}}
    wanted = cluster(port, roles=roles, mode="colocated")

    assert check(wanted) == []
    assert [spec.name for spec in plan(wanted, log_dir=tmp_path)] == ["engine-0"]


@pytest.mark.parametrize(("prefill", "lora"), [(1, 2), (2, 1), (2, 2)])
def test_there_are_as_many_engines_as_of_the_larger_pool(
    port: int, tiny_adapter: Path, tmp_path: Path, prefill: int, lora: int
) -> None:
    wanted = cluster(
        port,
        roles={"critic": {"adapter": str(tiny_adapter)}},
        prefill={"replicas": prefill},
        lora={"replicas": lora},
        mode="colocated",
    )

    assert [spec.name for spec in plan(wanted, log_dir=tmp_path)] == ["engine-0", "engine-1"]


def test_one_engine_has_no_place_for_weights_of_their_own(port: int, tiny_adapter: Path) -> None:
    roles = {"critic": {"adapter": str(tiny_adapter)}, "other": {"model": "tiny-a"}}

    [line] = lines(cluster(port, roles=roles, mode="colocated"))

    assert line.startswith("roles.other.model: tiny-a are weights of their own")


def test_an_adapter_with_a_larger_rank_than_allowed_is_a_problem(
    port: int, tiny_adapter: Path
) -> None:
    roles = {"critic": {"adapter": str(tiny_adapter)}}

    [line] = lines(cluster(port, roles=roles, lora={"max_lora_rank": 1}))

    assert line == (
        "roles.critic.adapter: has rank 4, lora.max_lora_rank is 1; "
        "set lora.max_lora_rank: 8, or leave it out"
    )


def test_an_adapter_named_as_a_model_is_a_problem(port: int, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")

    [line] = lines(cluster(port, roles={"critic": {"model": str(tmp_path)}}))

    assert "name it with `adapter:` instead of `model:`" in line


def test_every_role_is_looked_at(port: int, tmp_path: Path, decoder: Path) -> None:
    (decoder / "model.safetensors").unlink()
    roles = {
        "gone": {"model": str(tmp_path / "gone")},
        "hollow": {"model": str(decoder)},
        "typo": {"model": "tiny-q"},
    }

    gone, hollow, typo = lines(cluster(port, roles=roles))

    assert gone.startswith(f"roles.gone.model: {tmp_path / 'gone'}: there is no such directory")
    assert "has no weights" in hollow
    assert typo.startswith("roles.typo.model: model 'tiny-q': neither a store name")


def test_a_missing_base_is_one_problem(port: int, tmp_path: Path) -> None:
    [line] = lines(cluster(port, base={"model": str(tmp_path / "gone")}))

    assert line.startswith("base.model: ")


def test_weights_of_two_types_need_a_decision(port: int, decoder: Path) -> None:
    raw = json.loads((decoder / "config.json").read_text())
    (decoder / "config.json").write_text(json.dumps({**raw, "dtype": "bfloat16"}))
    roles = {"critic": {"model": str(decoder)}}

    [line] = lines(cluster(port, roles=roles))

    assert "its weights are bfloat16, the base's float32; set dtype: float32" in line
    assert check(cluster(port, roles=roles, dtype="float32")) == []


def test_a_context_beyond_the_model_is_a_problem(port: int) -> None:
    assert lines(cluster(port, max_model_len=5000)) == [
        "max_model_len: 5000 is more than the base's own context of 4096 tokens; set at most 4096"
    ]


def test_a_layout_that_the_template_refuses_is_a_problem(
    port: int, tiny_home: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_home / "models" / "tiny-base", tmp_path / "base")
    (base / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )

    [line] = lines(cluster(port, base={"model": str(base)}))

    assert "no system; set layout.tail_role: user" in line


def test_a_port_in_use_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]

        [problem] = check(cluster(taken))

    assert problem.where == "router.port"
    assert f"cannot listen on 127.0.0.1:{taken} (address already in use)" in problem.what


def test_an_unknown_host_is_a_problem(port: int) -> None:
    [problem] = check(cluster(port, router={"host": "no such host", "port": port}))

    assert problem.where == "router.host"


def test_kv_blocks_that_cannot_hold_one_request_are_found(port: int) -> None:
    [line] = lines(cluster(port, max_model_len=2048, kv={"blocks": 64, "block_size": 32}))
    assert "kv.blocks: 64 blocks of 32 tokens cannot hold one request" in line
    assert "set at least 65" in line


def test_vllm_arguments_that_the_launcher_sets_are_found(port: int) -> None:
    [line] = lines(cluster(port, prefill={"args": {"port": 9000}}))
    assert "prefill.args.port" in line
    assert "the launcher chooses free ports" in line


def test_a_base_that_does_not_tell_its_context_length_is_found(
    port: int, tiny_home: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_home / "models" / "tiny-base", tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    del config["max_position_embeddings"]
    (base / "config.json").write_text(json.dumps(config))
    [line] = lines(cluster(port, base={"model": str(base)}, roles={"planner": {"model": "tiny-a"}}))
    assert "has no max_position_embeddings" in line
    assert "set max_model_len" in line
