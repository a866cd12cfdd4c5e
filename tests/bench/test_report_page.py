"""The page and the pictures: whole, self-contained, and made of a folder alone."""

import json
import re
from pathlib import Path
from shutil import copy2

import pytest
import typer
from typer.testing import CliRunner

from prefillshare_bench import paper
from prefillshare_bench.report import files, markdown, pictures
from prefillshare_bench.report.command import report_command
from prefillshare_bench.report.points import read
from prefillshare_bench.report.sections import sections
from prefillshare_server.errors import ConfigError
from tests.bench import folders


def page(folder: Path) -> str:
    report_command(folder)
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds everything, with its page."""
    folder = folders.whole(tmp_path_factory.mktemp("points"))
    report_command(folder)
    return folder


def test_the_page_asks_for_no_other_file(whole: Path) -> None:
    text = (whole / "report.html").read_text()
    assert re.findall(r"https?:|//[a-z]+\.|@import|<script|<link|<img", text) == []
    targets = re.findall(r'(?:href|src)="([^"]*)', text) + re.findall(r"url\(([^)]*)", text)
    assert {target[0] for target in targets} == {"#"}


def test_every_link_inside_the_page_has_its_target(whole: Path) -> None:
    text = (whole / "report.html").read_text()
    wanted = set(re.findall(r'href="#([^"]*)"', text)) | set(re.findall(r"url\(#([^)]*)\)", text))
    assert wanted - set(re.findall(r'id="([^"]*)"', text)) == set()


def test_the_page_has_a_plot_and_tables_for_every_experiment(whole: Path) -> None:
    text = (whole / "report.html").read_text()
    parts = {part.split('"')[0]: part for part in text.split('<h2 id="')[1:]}
    assert all('<svg class="plot"' in parts[name] for name in files.FILES)
    assert all("<table>" in parts[name] for name in files.FILES)


def test_the_page_has_the_papers_figures_beside_ours(whole: Path) -> None:
    text = (whole / "report.html").read_text()
    for shown in ("4.10×", "1.90×", "4.50×", "9,560,000", "323", "42.2", "1.06", "45,919", "512"):
        assert f">{shown}<" in text, shown


def test_the_page_says_how_it_was_measured(whole: Path) -> None:
    text = (whole / "report.html").read_text()
    assert "Test CPU" in text
    assert "prefillshare bench run react" in text
    assert f"prefillshare bench report {whole}" in text
    assert "# per_model" in text


def test_text_of_points_is_shown_and_not_run(tmp_path: Path) -> None:
    folders.point(tmp_path, "react", "prefillshare", cluster_file="<script>alert(1)</script>")
    assert "<script>" not in page(tmp_path)


def test_what_was_not_measured_is_shown_as_missing(tmp_path: Path) -> None:
    folders.point(tmp_path, "react", "prefillshare")
    text = page(tmp_path)
    # Tables 6 and 7 have ReAct's points.
    assert text.count("Missing: nothing was measured for this part.") == len(files.FILES) - 3
    assert "Not measured: per-model baseline, shared pool" in text


@pytest.mark.parametrize("system", ["prefillshare", "multi_lora"])
def test_points_without_any_figure_make_every_section(tmp_path: Path, system: str) -> None:
    empty = dict.fromkeys(folders.figures())
    for file in files.FILES.values():
        folders.point(tmp_path, file.experiment, system, name="input_length_64", measured=empty)
    found = sections(files.results(read(tmp_path)))
    assert all(section.content is not None and section.tables for section in found)


@pytest.mark.parametrize("name", ["serving_react", "attribution", "input_length"])
def test_figures_that_are_unknown_can_be_drawn(tmp_path: Path, name: str) -> None:
    empty = dict.fromkeys(folders.figures())
    experiment = files.FILES[name].experiment
    folders.point(tmp_path, experiment, "multi_lora", name="input_length_64", measured=empty)
    assert "<text" in pictures.svg(name, files.results(read(tmp_path))[name])


def test_a_system_that_nobody_knows_is_shown_by_its_name(tmp_path: Path) -> None:
    folders.point(tmp_path, "react", "tomorrows_system")
    assert "tomorrows_system" in page(tmp_path)


def test_points_of_two_machines_are_told_of(tmp_path: Path) -> None:
    folders.point(tmp_path, "react", "prefillshare")
    folders.point(tmp_path, "react", "per_model", about={"cpu": "Another CPU"})
    text = page(tmp_path)
    assert "different machines" in text
    assert "Another CPU" in text


def test_docs_get_a_json_and_a_picture_for_every_experiment(tmp_path: Path) -> None:
    folders.point(tmp_path, "swarm", "prefillshare")
    folders.point(tmp_path, "memory", "prefillshare")
    report_command(tmp_path, docs=tmp_path / "docs")
    names = {path.name for path in (tmp_path / "docs").iterdir()}
    assert names == {"swarm.json", "swarm.png", "memory.json", "memory.png", "evaluation.md"}


def test_the_docs_page_has_every_table_and_where_it_is_from(whole: Path, tmp_path: Path) -> None:
    report_command(whole, docs=tmp_path)
    text = (tmp_path / "evaluation.md").read_text()
    found = sections(
        {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in files.FILES}
    )
    for section in found:
        assert f"## {section.title}\n" in text
        assert f"![{section.title}]({section.name}.png)" in text
        assert all(f"**{table.caption}**" in text for table in section.tables if not table.folded)
    assert text.count("prefillshare bench run") >= len(files.FILES)


def test_files_of_other_experiments_stay_and_are_on_the_docs_page(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    folders.point(tmp_path / "swarm", "swarm", "prefillshare")
    report_command(tmp_path / "swarm", docs=docs)
    before = (docs / "swarm.json").read_bytes()
    folders.point(tmp_path / "memory", "memory", "prefillshare")
    report_command(tmp_path / "memory", docs=docs)
    assert (docs / "swarm.json").read_bytes() == before
    text = (docs / "evaluation.md").read_text()
    assert "## Swarm (Table 5)" in text
    assert "## KV memory (Table 11)" in text


def test_the_figures_of_the_documentation_are_those_of_its_results_files(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "docs" / "results"
    for name in files.FILES:
        if (file := results / f"{name}.json").exists():
            copy2(file, tmp_path)
            assert file.with_suffix(".png").exists()
    assert markdown.write(tmp_path).read_text() == (results / markdown.NAME).read_text()


def test_the_same_points_make_the_same_files(tmp_path: Path) -> None:
    for system in ("prefillshare", "per_model"):
        folders.point(tmp_path / "points", "swarm", system)
    for again in ("first", "second"):
        report_command(tmp_path / "points", tmp_path / again / "page.html", tmp_path / again)
    for name in ("page.html", "swarm.json", "swarm.png"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no measured point"):
        read(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        read(tmp_path / "nothing")


def test_every_broken_point_is_named(tmp_path: Path) -> None:
    good = folders.point(tmp_path, "react", "prefillshare")
    content = json.loads(good.read_text())
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text(json.dumps({**content, "version": 9}))
    del content["figures"]
    (tmp_path / "c.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        read(tmp_path)
    texts = [str(problem) for problem in refused.value.problems]
    assert len(texts) == 3
    assert "a.json" in texts[0]
    assert "version 9" in texts[1]
    assert "lacks figures" in texts[2]


def test_help_tells_all_options() -> None:
    app = typer.Typer()
    app.command()(report_command)
    text = CliRunner().invoke(app, ["--help"], terminal_width=120).output
    assert all(word in text for word in ("FOLDER", "--out", "--docs", "Examples:"))


def test_the_papers_ratios_follow_from_its_figures() -> None:
    baseline, ours = paper.ATTRIBUTION["per_model"], paper.ATTRIBUTION["prefillshare"]
    assert round(baseline["local_prefill_tokens"] / ours["local_prefill_tokens"]) == 14
    workers = paper.WORKER_LOAD["per_model"]["prefilled_per_worker"].values()
    assert sum(workers) == paper.WORKER_LOAD["per_model"]["prefilled_tokens"]
    assert max(workers) / min(workers) == pytest.approx(42.2, abs=0.05)
