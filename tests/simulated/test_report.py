"""`ladder report`: formats, the files a tune leaves, and run folders that are not what they should be."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path

import pandas as pd
import pytest
from helpers import make_candidate, there
from helpers.searches import make_space
from helpers.tunes import on_paper

from ladder.candidates import Candidate
from ladder.cli.main import main
from ladder.cli.report import read_reported_run
from ladder.events.outcome import Outcome, Record
from ladder.report import page as page_module
from ladder.report.about import command_line, read_about
from ladder.report.figures import memory_by_part
from ladder.report.markdown import markdown
from ladder.report.run_data import ReportedRun
from ladder.report.speed_figure import speed_over_time
from ladder.report.summary import spelled_out, usage
from ladder.report.table import rows
from ladder.report.writing import write_reports
from ladder.runs.journal import Journal, ReadOnlyJournal
from ladder.search.belief import believe
from ladder.units import gib


@pytest.fixture(scope="module")
def folder(simulated_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tune's folder, to write reports into."""
    copy = tmp_path_factory.mktemp("a tune") / "run"
    shutil.copytree(simulated_run, copy)
    shutil.copy(simulated_run.parent / "best_config.json", copy.parent)
    return copy


@pytest.fixture(scope="module")
def run(folder: Path) -> ReportedRun:
    return read_reported_run(folder)


@pytest.fixture
def best(run: ReportedRun) -> Record:
    return there(run.best)


def test_a_tune_leaves_its_numbers_its_answer_and_the_report_that_is_made_later(
    simulated_run: Path, folder: Path, run: ReportedRun, tmp_path: Path
) -> None:
    assert len(pd.read_csv(folder / "trials.csv")) == len(run.entries)
    answer = json.loads((folder / "best_config.json").read_text())
    assert answer == json.loads((folder.parent / "best_config.json").read_text()) == run.config
    page, again = (folder / "report.html").read_text(), tmp_path / "again.html"
    assert answer["ladder"]["engine"] in page
    assert "How to use it" in page
    assert main(["report", str(simulated_run), "--output", str(again)]) == 0
    assert again.read_text() == page


def test_only_what_was_measured_is_said_to_be_worth_verifying(run: ReportedRun) -> None:
    config, path = there(run.config), Path("/a run/best_config.json")
    assert "ladder verify" not in usage(config, path)
    measured = {**config, "ladder": {**config["ladder"], "proof": {}}}
    assert usage(measured, path).endswith("\nladder verify '/a run/best_config.json'")


def test_every_file_that_the_report_says_to_use_is_there_whatever_the_output_was_called(tmp_path: Path) -> None:
    on_paper(tmp_path, "llama-3.2-1b", rungs="zero1", output=tmp_path / "x.json")
    page = (tmp_path / "run" / "report.html").read_text()
    said = unescape(page.partition("How to use it</h2>")[2].partition("<details>")[0])
    named = re.findall(r"(?:--deepspeed|--config_file|ladder export) ([^\s<]+)", said)
    assert len(named) == 3
    assert [name for name in named if not Path(name).is_file()] == []
    companions = {f"best_config.{end}" for end in ("json", "trainer.json", "accelerate.yaml", "launch.sh")}
    assert companions <= {path.name for path in (tmp_path / "run").iterdir()}
    trainer = json.loads((tmp_path / "run" / "best_config.trainer.json").read_text())
    assert trainer["deepspeed"] == str(tmp_path / "run" / "best_config.json")
    assert '"$here"/best_config.accelerate.yaml' in (tmp_path / "run" / "best_config.launch.sh").read_text()


def test_without_a_package_of_its_report_a_tune_succeeds_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "ladder.report.page")
    output, run_dir = tmp_path / "best_config.json", tmp_path / "run"
    options = ["--launcher", "simulated", "--machine", "a100-40", "--gpus", "1", "--rung", "zero1"]
    options += ["--output", str(output), "--run-dir", str(run_dir)]
    assert main(["tune", "llama-3.2-1b", *options]) == 0
    printed = capsys.readouterr()
    assert "report.html cannot be written without jinja2; `pip install jinja2`" in printed.err
    assert "Traceback" not in printed.err
    assert "Report: " not in printed.out
    assert output.exists()
    assert (run_dir / "trials.csv").exists()
    assert not (run_dir / "report.html").exists()
    assert main(["report", str(run_dir), "--format", "html"]) == 4
    assert "pip install jinja2" in capsys.readouterr().err


def test_a_bug_in_a_figure_does_not_undo_a_tune(
    run: ReportedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a part that is not there")

    monkeypatch.setattr(page_module, "memory_by_part", broken)
    assert write_reports(replace(run, folder=tmp_path)) == [
        """report.html could not be written (KeyError: 'a part that is not there'), a bug in ladder; """
        "`ladder report` shows where."
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"about.json", "trials.csv"}


def test_csv_has_every_candidate_and_its_predicted_speed_where_it_was_not_tried(
    folder: Path, run: ReportedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder), "--format", "csv"]) == 0
    table = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert len(table) == len(run.entries)
    predicted = table[table["status"] == "predicted"]
    assert predicted["predicted_tokens_per_second"].notna().all()
    tried = table[table["status"].isin(["measured", "answer"])]
    assert tried["predicted_tokens_per_second"].isna().all()  # these are for what was not tried


def test_what_was_predicted_is_what_was_known_before_the_trial(run: ReportedRun) -> None:
    first = next(entry for entry in run.entries if entry.record == run.records[0])
    candidate = run.space.by_key[str(first.candidate_key)]
    before = run.space.predicted_peak(candidate)
    assert first.foretold == before != believe(run.space, run.records).outlook(candidate).memory.peak
    (row,) = rows([first], {})
    assert row["predicted_device_gib"] == gib(before)


def test_runs_are_told_apart_in_every_format(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(tmp_path / parent / "run") for parent in "AB"]
    for each in runs:
        shutil.copytree(folder, each)
    assert main(["report", *runs, "--format", "csv"]) == 0
    assert set(pd.read_csv(io.StringIO(capsys.readouterr().out))["run"]) == {"A/run", "B/run"}
    assert main(["report", *runs, "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("|  | A/run | B/run |")
    assert main(["report", *runs, "--output", str(tmp_path / "both.html")]) == 0
    assert "<th>A/run</th><th>B/run</th>" in (tmp_path / "both.html").read_text()


def test_markdown_says_the_answer_and_what_was_measured(run: ReportedRun, best: Record) -> None:
    text = markdown([run])
    assert f"**{best.candidate_key}**" in text
    tried = [entry for entry in run.entries if entry.record]
    assert sum(line.startswith(tuple(f"| {entry.rung}" for entry in tried)) for line in text.splitlines()) == len(tried)


def test_no_name_that_others_chose_is_markup_anywhere_in_markdown(run: ReportedRun, best: Record) -> None:
    workload = run.space.workload
    model = replace(workload.model, name="a\n# *model*")
    space = replace(run.space, workload=replace(workload, model=model), gpu_name="GPU\n<b>")
    warned = replace(best, warnings=("one\n- `t|wo`",))
    records = [warned if record is best else record for record in run.records]
    text = markdown([replace(run, space=space, records=records, folder=Path("my_run_*of*_`today`"))])
    lines = text.splitlines()
    assert lines[0].startswith(r"## a # \*model\* on 8 × GPU \<b\>, ")
    assert lines[2].endswith(r" my\_run\_\*of\*\_\`today\`")
    assert r"- Warning: one - \`t\|wo\`" in lines


def test_the_bars_of_memory_add_up_to_what_was_measured(run: ReportedRun, best: Record) -> None:
    memory = there(memory_by_part(run))
    assert memory.limit == 40
    answer = memory.groups[0]
    assert answer.is_answer
    assert answer.label.startswith(best.candidate_key)
    totals = {bar.name: bar.total for bar in answer.bars}
    assert totals["proof"] == pytest.approx(there(best.measurement).peak_device / 2**30, abs=0.1)
    assert totals.keys() == {"predicted", "trial", "proof"}


def test_the_tune_over_time_ends_at_the_answer_s_proof_and_has_every_trial(run: ReportedRun, best: Record) -> None:
    figure = there(speed_over_time(run))
    reached = [y for _, y in figure.line]
    assert reached == sorted(reached)
    assert reached[-1] == best.tokens_per_second
    trials = [point.text for series in figure.series for point in series.points]
    assert len(trials) == len([record for record in run.records if record.purpose != "probe"])
    total = sum(sum(each.values()) for each in run.trial_seconds.values())
    assert figure.line[-1][0] == pytest.approx(total)


def test_the_report_says_how_much_faster_than_the_recipe_s_first_fit_and_where_it_is_from(run: ReportedRun) -> None:
    said = {**run.about, "command": "ladder tune llama-2-7b", "NVIDIA driver": "570.1", "date": "2026-01-02 03:04 UTC"}
    page = page_module.html([replace(run, about=said)])
    assert re.search(r'class="headline">(About )?\d+\.\d times as fast as the documented recipe&#39;s first fit<', page)
    for words in (
        "<pre>ladder tune llama-2-7b</pre>",
        "<td>570.1</td>",
        "<td>2026-01-02 03:04 UTC</td>",
    ):
        assert words in page
    assert "times as fast as the documented recipe's first fit" in markdown([run])


def test_where_nothing_fits_the_report_says_what_would(run: ReportedRun) -> None:
    outcome = Outcome(kind="gpu_oom", sentence="ran out", moment="backward", bytes_asked=2 << 30, bytes_free=1 << 30)
    failed = [
        replace(record, outcome=outcome, measurement=None, tokens_per_second=None)
        for record in run.records
        if record.purpose == "measure"
    ]
    nothing = replace(run, records=failed, config=None, space=replace(run.space, memory_limit=1 << 30))
    for text in (page_module.html([nothing]), markdown([nothing])):
        assert "Nothing fits so far." in text
        assert "What would fit, by prediction: " in text
    assert "What would fit" not in page_module.html([run])


def test_a_tune_notes_when_and_by_which_command_it_was_made(run: ReportedRun, tmp_path: Path) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", run.about["date"])
    command = ["/venv/bin/ladder", "tune", "a model", "--gpus", "4"]
    assert command_line(command) == "ladder tune 'a model' --gpus 4"
    assert command_line(["notebook.py", "tune"]) is None
    assert read_about(tmp_path) == {}
    (tmp_path / "about.json").write_text("[1")
    assert read_about(tmp_path) == {}


def without_results(folder: Path, tmp_path: Path) -> Path:
    """A tune that was ended before its first trial was."""
    copy = tmp_path / "no results"
    shutil.copytree(folder, copy)
    lines = (copy / "journal.log").read_text().splitlines()
    kept = [line for line in lines if '"space"' in line or '"run"' in line or '"study_name"' in line]
    (copy / "journal.log").write_text("\n".join(kept) + "\n")
    return copy


def of_an_older_schema(folder: Path, tmp_path: Path) -> Path:
    """A whole and undamaged history that calls things by other names."""
    copy = tmp_path / "older"
    copy.mkdir()
    logs = json.dumps(ReadOnlyJournal(folder / "journal.log").read_logs(0)).replace('"engines"', '"steps"')
    kept = [{key: value for key, value in log.items() if key != "ladder_crc32"} for log in json.loads(logs)]
    Journal(copy / "journal.log").append_logs(kept)
    return copy


def test_a_run_folder_that_is_none_or_empty_or_older_or_damaged_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    cases = {
        tmp_path: "is not a run folder",
        tmp_path / "missing": "is not a run folder",
        tmp_path / "file": "is not a run folder",
        without_results(folder, tmp_path): "has no results yet",
        of_an_older_schema(folder, tmp_path): "another version of ladder",
    }
    for path, words in cases.items():
        assert main(["report", str(path)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert words in printed.err
        assert printed.err.count("\n") == 1
    text = (folder / "journal.log").read_text()
    (tmp_path / "journal.log").write_text(text.replace('"engines"', '"engine?"'))
    assert main(["report", str(tmp_path)]) == 4
    assert "is damaged (line" in capsys.readouterr().err


def test_an_answer_edited_by_hand_is_left_out_of_the_report(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "edited"
    shutil.copytree(folder, copy)
    answer = json.loads((copy / "best_config.json").read_text())
    answer["train_micro_batch_size_per_gpu"] += 1
    (copy / "best_config.json").write_text(json.dumps(answer))
    assert read_reported_run(copy).config is None
    assert main(["report", str(copy)]) == 0
    assert "How to use it" not in (copy / "report.html").read_text()


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (
            make_candidate("zero2", checkpointing=False, micro_batch=4, accumulation=8),
            "ZeRO-2, no checkpointing, micro-batch 4, accumulation 8, on 2 GPUs",
        ),
        (
            make_candidate("zero3+param-nvme+opt-nvme", checkpointing=True, micro_batch=1, accumulation=1),
            "ZeRO-3 with the optimizer and parameters on NVMe, checkpointing of every layer, micro-batch 1, on 2 GPUs",
        ),
        (
            replace(make_candidate("zero3+param-cpu+opt-cpu+lean", accumulation=1), checkpoint_every=2),
            "ZeRO-3 in small buffers with the optimizer and parameters in host memory, checkpointing of every second "
            "layer, micro-batch 1, on 2 GPUs",
        ),
        (
            make_candidate("ddp", checkpointing=False, micro_batch=2, accumulation=1),
            "DDP, no checkpointing, micro-batch 2, on 2 GPUs",
        ),
    ],
    ids=lambda value: value.key if isinstance(value, Candidate) else "",
)
def test_a_candidate_is_said_in_words(candidate: Candidate, words: str) -> None:
    assert spelled_out(candidate, make_space(candidate.engine.rung.name, world_size=2)) == words


# ladder runs


def test_past_tunes_are_listed_found_by_what_is_said_of_them_and_shown_side_by_side(
    simulated_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "other"):
        shutil.copytree(simulated_run, tmp_path / "ladder-runs" / name)
    (tmp_path / "ladder-runs" / "broken").mkdir()
    (tmp_path / "ladder-runs" / "broken" / "journal.log").write_text("{")
    monkeypatch.chdir(tmp_path)
    best = there(read_reported_run(simulated_run).best)
    assert main(["runs", "--format", "json"]) == 0
    listed = capsys.readouterr()
    rows = json.loads(listed.out)
    assert {row["run"] for row in rows} == {"ladder-runs/one", "ladder-runs/other"}
    assert {(row["model"], row["tokens_per_second"], row["state"]) for row in rows} == {
        ("llama-2-7b", best.tokens_per_second, "simulated")
    }
    assert listed.err.startswith("Left out: ")
    assert main(["runs", "LLAMA", "a100"]) == 0
    table = capsys.readouterr().out
    assert "ladder-runs/one" in table
    assert "ladder-runs/other" in table
    assert main(["runs", "llama", "one", "--compare"]) == 0
    compared = capsys.readouterr().out
    assert "other" not in compared
    assert f"{best.tokens_per_second:,.0f}" in compared
    assert main(["runs", "h100"]) == 0
    assert capsys.readouterr().out == "No tune under ./ladder-runs has h100.\n"


def test_a_report_is_opened_in_the_browser_or_is_said_to_be_where_it_is(
    simulated_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)) or len(opened) == 1)
    page = tmp_path / "a page.html"
    for _ in range(2):  # the second time no browser is found
        assert main(["report", str(simulated_run), "--output", str(page), "--open"]) == 0
    assert opened == [page.as_uri()] * 2
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"Wrote {page}",
        f"No browser was found here; open {page} in one.",
    ]
