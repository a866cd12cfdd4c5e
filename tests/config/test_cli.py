"""The `prefillshare` command: what it prints, and how it ends."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from prefillshare_server import cli
from prefillshare_server.launch.ports import free_ports
from tests.config.conftest import WriteCluster

CLUSTER = "base: {model: tiny-base}\nroles: {planner: {model: tiny-base}}\nrouter: {port: PORT}\n"


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Run:
    """Calls the console script in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Result:
        self._monkeypatch.setattr(sys, "argv", ["prefillshare", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = self._capsys.readouterr()
        return Result(int(ended.value.code or 0), out, err)


@pytest.fixture
def run(
    tiny_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tiny_home))
    monkeypatch.setenv("COLUMNS", "200")
    return Run(monkeypatch, capsys)


@pytest.fixture
def cluster_file(write_cluster: WriteCluster) -> Path:
    (port,) = free_ports(1)
    return write_cluster(CLUSTER.replace("PORT", str(port)))


def test_check_says_that_a_cluster_can_be_served(run: Run, cluster_file: Path) -> None:
    result = run("check", cluster_file)

    assert result.code == 0
    assert "planner" in result.out
    assert "can be served" in result.out


def test_a_problem_ends_with_code_2_and_one_line_each(run: Run, cluster_file: Path) -> None:
    result = run(
        "check",
        cluster_file,
        "--set",
        "roles.a.model=tiny-other-geometry",
        "--set",
        "roles.b.model=./nowhere",
    )

    first, second = result.err.splitlines()
    assert result.code == 2
    assert first.startswith(f"error: {cluster_file}: roles.a.model: ")
    assert second.startswith(f"error: {cluster_file}: roles.b.model: ")


@pytest.mark.parametrize("command", ["check", "serve"])
def test_an_untrained_decoder_is_refused_unless_it_is_allowed(
    run: Run, cluster_file: Path, command: str
) -> None:
    untrained = ("--set", "roles.planner.model=tiny-a")

    refused = run(command, cluster_file, *untrained)

    assert refused.code == 2
    assert refused.err.startswith(f"error: {cluster_file}: roles.planner.model: ")
    assert "--allow-untrained" in refused.err
    assert run("check", cluster_file, *untrained, "--allow-untrained").code == 0


def test_the_option_that_allows_them_is_part_of_the_configuration(
    run: Run, cluster_file: Path
) -> None:
    shown = yaml.safe_load(run("serve", cluster_file, "--print-config", "--allow-untrained").out)

    assert shown["allow_untrained"] is True


def test_check_shows_which_adapter_is_on_the_base(
    run: Run, cluster_file: Path, tiny_adapter: Path
) -> None:
    role = f"roles.critic.adapter={tiny_adapter}"

    result = run("check", cluster_file, "--set", role, "--allow-untrained")

    assert result.code == 0
    assert f"tiny-base + adapter {tiny_adapter}" in result.out.replace("\n", "")


def test_serve_refuses_what_check_refuses(run: Run, cluster_file: Path) -> None:
    result = run("serve", cluster_file, "--set", "roles.a.model=./nowhere")

    assert result.code == 2
    assert "there is no such directory" in result.err


def test_print_config_shows_defaults_and_overrides(run: Run, cluster_file: Path) -> None:
    result = run("serve", cluster_file, "--print-config", "--port", "9", "--set", "kv.lease_s=60")

    shown = yaml.safe_load(result.out)
    assert result.code == 0
    assert shown["router"]["port"] == 9
    assert shown["kv"]["lease_s"] == 60
    assert shown["layout"]["kind"] == "context-first"


def test_a_setting_without_a_value_is_refused(run: Run, cluster_file: Path) -> None:
    result = run("check", cluster_file, "--set", "kv.lease_s")

    assert result.code == 2
    assert "write for example router.port=9000" in result.err


def test_models_list_names_every_model(run: Run) -> None:
    result = run("models", "list")

    assert "smollm2-135m-instruct" in result.out
    assert "tiny-base" in result.out


def test_models_path_prints_only_the_path(run: Run, tiny_home: Path) -> None:
    assert run("models", "path", "tiny-a").out == f"{tiny_home / 'models' / 'tiny-a'}\n"


def test_models_path_of_an_unbuilt_model_says_how_to_build_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tmp_path))

    result = run("models", "path", "tiny-a")

    assert result.code == 2
    assert "run: prefillshare models build tiny-a" in result.err


def test_models_build_and_remove(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tmp_path))

    built = run("models", "build", "tiny-a", "tiny-b")
    removed = run("models", "remove", "tiny-a")

    assert built.out.split() == [str(tmp_path / "models" / name) for name in ("tiny-a", "tiny-b")]
    assert "draw tiny-a" in built.err
    assert removed.out == "removed tiny-a\n"
    assert not (tmp_path / "models" / "tiny-a").exists()


def test_an_unknown_model_is_a_configuration_error(run: Run) -> None:
    result = run("models", "build", "tiny-z")

    assert result.code == 2
    assert "not a store model; did you mean" in result.err


def test_version_names_program_and_engine(run: Run) -> None:
    result = run("--version")

    assert result.code == 0
    assert result.out.startswith("prefillshare ")
    assert "vllm" in result.out


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from prefillshare_server import cli\n"
        "try:\n    cli.app(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'vllm', 'pydantic', 'huggingface_hub'}\n"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert "prefillshare serve cluster.yaml" in result.stdout


def test_without_the_servers_packages_the_command_says_what_to_install(cluster_file: Path) -> None:
    program = (
        "import sys; sys.modules['yaml'] = None\n"
        f"sys.argv = ['prefillshare', 'check', {str(cluster_file)!r}]\n"
        "from prefillshare_server.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "yaml is not installed" in done.stderr
    assert "install the extra `server` (GPU) or `cpu`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("mode", "workers"),
    [("disaggregated", ["1 prefill", "1 shared"]), ("colocated", ["1 engines", "the engines"])],
)
def test_check_says_who_serves_each_role(
    run: Run, cluster_file: Path, mode: str, workers: list[str]
) -> None:
    with cluster_file.open("a") as file:
        file.write(f"lora: {{}}\nmode: {mode}\n")
    result = run("check", cluster_file)

    assert result.code == 0, result.err
    base, planner = result.out.splitlines()[1:3]
    assert [base.strip().endswith(workers[0]), planner.strip().endswith(workers[1])] == [True, True]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:8000", "no url", "http://[::1"])
def test_roles_say_where_no_router_answers(run: Run, url: str) -> None:
    result = run("roles", "list", "--url", url)

    assert result.code == 2
    assert url in result.err
    assert "no router answers there" in result.err
