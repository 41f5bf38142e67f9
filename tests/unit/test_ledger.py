"""The ledger and `explain --why`: each candidate has its reason, with numbers and a trial."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from helpers import make_candidate, make_measurement, make_record, there
from helpers.searches import fitting, make_space, out_of_memory, play
from typer.testing import CliRunner

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.cli.explain import explain, newest_run
from ladder.errors import UsageError
from ladder.events.outcome import Outcome
from ladder.runs.history import History
from ladder.runs.snapshot import space_to_dict
from ladder.runs.stored_run import read_run
from ladder.search.auto import auto
from ladder.search.decisions import Stop
from ladder.search.ledger import Entry, ledger
from ladder.search.space import REFUSED
from ladder.search.why import why_not


def by_key(entries: list[Entry]) -> dict[str | None, Entry]:
    return {entry.candidate_key: entry for entry in entries}


def test_every_candidate_is_measured_predicted_or_pruned_and_says_why():
    space = make_space()
    records = [*play(space, "fits"), out_of_memory(make_candidate("zero1", checkpointing=False, micro_batch=4), "0099")]
    entries = ledger(space, records, {})
    assert [entry.candidate_key for entry in entries] == [candidate.key for candidate in space.candidates]
    assert all(entry.why for entry in entries)
    assert {entry.status for entry in entries} == {"measured", "predicted", "pruned"}
    for entry in entries:
        assert (entry.record is not None) == (entry.status == "measured")
        assert entry.predicted is not None or entry.status != "predicted"
        if entry.predicted is not None:
            assert entry.predicted.low < entry.predicted.tokens_per_second < entry.predicted.high
            assert entry.predicted.peak < entry.predicted.upper


def test_what_the_same_work_reached_elsewhere_is_told_as_a_limit_and_not_as_a_prediction():
    space = make_space("zero2", "zero2+opt-cpu")
    reached = fitting(space, space.by_key["zero2 ckpt=on mb=8"], slower=6.0)
    entries = {entry.candidate_key: entry for entry in ledger(space, [reached], {})}
    held, free = entries["zero2+opt-cpu ckpt=on mb=4"], entries["zero2 ckpt=off mb=1"]
    assert there(held.predicted).tokens_per_second == reached.tokens_per_second
    assert held.why.startswith(f"at most {reached.tokens_per_second:,.0f} tokens/s, which the same work reached")
    shown = [there(entry.predicted).is_held for entry in (held, free)]
    assert shown == [True, False]


def test_a_rung_that_fits_but_loses_is_explained_with_both_speeds():
    space = make_space("zero2", "zero3")
    slow = fitting(space, make_candidate("zero2", micro_batch=4, accumulation=4), slower=2.0, trial="0002")
    fast = make_candidate("zero3", micro_batch=4, accumulation=4)
    winner = make_record(fast, tokens_per_second=99_999.0)
    proof = make_record(fast, tokens_per_second=99_999.0, purpose="proof", trial="0003")
    entries = ledger(space, [slow, winner, proof], {})
    sentence = why_not("zero2", entries, space)
    assert "zero2 fits" in sentence
    assert "0002" in sentence
    assert "99,999" in sentence
    assert "zero3 is the answer" in why_not("zero3", entries, space)


def test_a_rung_is_explained_with_its_failure_its_prediction_or_the_machine():
    space = make_space("zero0", "zero1", "zero2", "zero2+opt-cpu", "zero3")
    candidate = make_candidate("zero2", micro_batch=2, accumulation=8)
    records = [make_record(candidate, measurement=make_measurement(), tokens_per_second=1e9)]
    records += [make_record(each, "crash", trial="0004") for each in space.candidates if each.engine.key == "zero1"]
    records += [
        out_of_memory(each, "0007") for each in space.candidates if each.engine.key == "zero3" and each.micro_batch == 1
    ]
    entries = ledger(space, records, {RUNGS_BY_NAME["zero3+opt-nvme"]: "no --nvme-path was given"})
    for rung, words in (
        ("zero0", "predicted to need"),
        ("zero0", "80.00 GiB"),
        ("zero1", "zero1 failed: "),
        ("zero2+opt-cpu", "was not tried"),
        ("zero2+opt-cpu", "tokens/s"),
        ("zero3", "trial 0007"),
        ("zero3+opt-nvme", "no --nvme-path"),
    ):
        assert words in why_not(rung, entries, space), rung
    with pytest.raises(ValueError, match="not part"):
        why_not("zero3+param-cpu", entries, space)


def test_a_rung_whose_proofs_failed_is_not_said_to_fit():
    space = make_space("zero2", "zero3", micro_batches=(4,))
    lucky = [candidate for candidate in space.candidates if candidate.engine.key == "zero2"]
    records = [fitting(space, candidate, slower=0.5) for candidate in lucky]
    failed = [replace(out_of_memory(candidate, "0002"), purpose="proof") for candidate in lucky]
    slower = fitting(space, make_candidate("zero3", micro_batch=4, accumulation=4), trial="0003")
    entries = ledger(space, [*records, failed[0], slower], {})
    sentence = why_not("zero2", entries, space)
    assert f"its fastest measured candidate, {lucky[1].key.removeprefix('zero2 ')}" in sentence
    entries = ledger(space, [*records, *failed, slower], {})
    sentence = why_not("zero2", entries, space)
    assert sentence.startswith(
        "zero2 is not the answer: ckpt=on mb=4 fitted in trial 0001, and its proof of fit failed"
    )
    assert why_not("zero3", entries, space).startswith("zero3 is the best so far")


def test_a_candidate_measured_faster_than_the_answer_is_not_said_to_be_slower():
    space = make_space("zero2", "zero3")
    answer = fitting(space, make_candidate("zero3", micro_batch=4, accumulation=4))
    speed = there(answer.tokens_per_second)
    near = replace(
        fitting(space, make_candidate("zero2", micro_batch=4, accumulation=4)), tokens_per_second=speed * 1.01
    )
    entries = ledger(space, [answer, near, replace(answer, purpose="proof", trial="0002")], {})
    sentence = why_not("zero2", entries, space)
    assert "-1.0%" not in sentence
    assert "within the noise of the answer (+1.0%)" in sentence


NOISY = {"zero1": (592.0, 432.0), "zero2": (792.0, 387.0), "zero3": (600.0, None)}
"""Tokens/s in the trial and in the proof, where there was one: a small model on busy CPU cores scatters so."""


def noisy() -> dict[str | None, Entry]:
    """The ledger of a tune whose fastest trial did not have the fastest proof."""
    space = make_space(*NOISY, micro_batches=(4,))
    records = []
    for rung, (trial, proof) in NOISY.items():
        candidate = make_candidate(rung, micro_batch=4, accumulation=4)
        records.append(make_record(candidate, tokens_per_second=trial))
        if proof is not None:
            records.append(make_record(candidate, tokens_per_second=proof, purpose="proof", trial="0009"))
    return by_key(ledger(space, records, {}))


def test_a_trial_stands_beside_its_proof_and_only_a_few_per_cent_are_noise():
    why = {entry.rung: entry.why for entry in noisy().values() if entry.record}
    assert why["zero1"] == "the fastest that fits, proven in fresh processes; its proof reached 432 tokens/s"
    assert why["zero2"] == "+33.8% against the answer's trial, but its proof reached 387 tokens/s and the answer's 432"
    assert why["zero3"] == "within the noise of the answer (+1.4%)"
    proofs = {entry.rung: entry.proof.tokens_per_second for entry in noisy().values() if entry.proof}
    assert proofs == {"zero1": 432.0, "zero2": 387.0}
    sentence = why_not("zero1", list(noisy().values()), make_space(*NOISY))
    assert (
        sentence == "zero1 is the answer: zero1 ckpt=on mb=4 reached 592 tokens/s in its trial, and 432 in its proof."
    )


def test_the_answer_is_not_said_to_be_the_fastest_of_all_where_torch_alone_is_faster():
    space = make_space("zero1", "ddp", micro_batches=(4,))
    speeds = {"zero1": 400.0, "ddp": 500.0}
    candidates = {rung: make_candidate(rung, micro_batch=4, accumulation=4) for rung in speeds}
    records = [
        make_record(candidates[rung], tokens_per_second=speed, purpose=purpose)
        for rung, speed in speeds.items()
        for purpose in ("measure", "proof")
    ]
    for on_paper, how in ((False, "proven in fresh processes"), (True, "simulated")):
        why = {entry.rung: entry.why for entry in ledger(space, records, {}, on_paper=on_paper) if entry.record}
        assert why["zero1"] == f"the fastest with DeepSpeed, {how}; its proof reached 400 tokens/s"
        assert why["ddp"] == "faster than the answer, without DeepSpeed; its proof reached 500 tokens/s"
    (best,) = (entry.why for entry in ledger(space, records[2:], {}) if entry.status == "answer")
    assert best == "the fastest that fits, proven in fresh processes; its proof reached 500 tokens/s"


def test_what_is_said_of_a_candidate_left_agrees_with_the_bound_that_ended_the_search():
    space = make_space("zero1", "zero2", "zero3")
    trials = play(space, "fits")
    best = max(trials, key=lambda record: record.tokens_per_second or 0.0)
    slower = next(record for record in trials if record.candidate_key != best.candidate_key)
    # The answer is not the fastest trial: its proof came out slower than another's.
    proofs = [replace(best, purpose="proof", trial="0098", tokens_per_second=1.0)]
    proofs.append(replace(slower, purpose="proof", trial="0099", tokens_per_second=2.0))
    ended = auto(space, trials)
    assert isinstance(ended, Stop)
    than = best.tokens_per_second or 0.0
    entries = ledger(space, [*trials, *proofs], {})
    ends = [entry.predicted.high / than - 1 for entry in entries if entry.predicted and entry.predicted.fits > 0.5]
    most = re.search(r"no candidate left is more than ([\d.]+)% faster", ended.reason)
    assert 100 * max(ends) <= (float(most[1]) if most else 0.0) + 0.05
    for entry in entries:
        if entry.predicted and entry.predicted.fits > 0.5:
            ahead = entry.predicted.high / than - 1
            where = "above" if ahead > 0 else "below"
            assert f"with a chance of one in ten {abs(ahead):.1%} {where} the fastest trial" in entry.why
            assert entry.brief == f"at {'most' if ahead > 0 else 'least'} {abs(ahead):.1%} {where} the fastest trial"
    assert "with a chance of one in ten or more" in ended.reason
    assert f"the fastest trial ({than:,.0f} tokens/s)" in ended.reason


app = typer.Typer()
app.command("explain")(explain)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of two rungs in which zero2 lost, with a rung that is not supported."""
    folder = tmp_path / "it's a run"
    space = make_space("zero2", "zero3")
    with History(folder, "fingerprint", {}) as history:
        # As a tune notes it before its first trial.
        unsupported = {"zero3+opt-nvme": "no --nvme-path was given"}
        history._study.set_user_attr("space", {"space": space_to_dict(space), "unsupported": unsupported})
        slow = fitting(space, make_candidate("zero2", micro_batch=4, accumulation=4), slower=2.0)
        fast = fitting(space, make_candidate("zero3", micro_batch=4, accumulation=4), trial="0002")
        history.add([slow, fast], space.by_key, {"start": 1.0})
    return folder


def test_explain_gives_a_pipe_one_line_a_candidate_with_its_whole_reason(run_folder: Path):
    head, *lines, counts = CliRunner().invoke(app, [str(run_folder)], catch_exceptions=False).stdout.splitlines()
    stored = read_run(run_folder)
    entries = ledger(stored.space, stored.records, stored.unsupported)
    assert head.split() == ["rung", "ckpt", "mb", "status", "tokens/s", "proof", "GiB", "trial", "why"]
    assert len(lines) == len(entries) > 20
    assert all(line.endswith(entry.why) for line, entry in zip(lines, entries, strict=True))
    assert counts.startswith("2 measured")


def test_explain_shows_the_fastest_few_or_one_rung(run_folder: Path):
    def shown(*options: str) -> list[str]:
        return CliRunner().invoke(app, [str(run_folder), *options], catch_exceptions=False).stdout.splitlines()

    top = shown("--top", "3")
    assert len(top) == 1 + 3 + 1
    assert top[-1].startswith("3 of ")
    assert {line.split()[0] for line in shown("--rung", "zero2")[1:-1]} == {"zero2"}
    assert len(shown("--rung", "zero2", "--top", "1")) == 3
    with pytest.raises(UsageError, match="--rung zero1 was not part of this tune"):
        shown("--rung", "zero1")
    with pytest.raises(UsageError, match=r"zero1 .*not part of this tune"):
        shown("--why", "zero1")
    with pytest.raises(UsageError, match="leave out --top"):
        shown("--why", "zero2", "--top", "3")


def test_explain_writes_one_json_document_also_of_an_error(run_folder: Path, tmp_path: Path):
    options = ["--format", "json", "--top", "2"]
    document = json.loads(CliRunner().invoke(app, [str(run_folder), *options], catch_exceptions=False).stdout)
    first, second = document["candidates"]
    assert first["predicted_tokens_per_second"] > second["predicted_tokens_per_second"]
    assert {"why", "proof_tokens_per_second", "predicted_high", "trial"} <= first.keys()
    assert document["recipe_first_fit"]["measured_in_trial"] is None
    nowhere = CliRunner().invoke(app, [str(tmp_path / "nowhere"), "--format", "json"])
    assert isinstance(nowhere.exception, UsageError)
    assert "is not a run folder" in json.loads(nowhere.stdout)["error"]


def test_explain_leaves_a_torn_tail_to_the_tune_that_writes_it(run_folder: Path):
    journal = run_folder / "journal.log"
    with History(run_folder, "fingerprint", {}):
        whole = journal.read_bytes()
        journal.write_bytes(torn := whole + b'{"op_code": 4, "wor')
        result = CliRunner().invoke(app, [str(run_folder), "--why", "zero2"], catch_exceptions=False)
    assert result.stdout.startswith("zero2 fits, but")
    assert journal.read_bytes() == torn
    assert not (run_folder / "journal.log.lock").exists()


def test_the_newest_run_is_the_one_tuned_last_even_if_all_came_from_its_history(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no run in"):
        newest_run()
    for age, name in ((2000, "again"), (1000, "between")):
        folder = tmp_path / "ladder-runs" / name
        with History(folder, "fingerprint", {}):
            pass
        for file in ("journal.log", "lock"):
            written = (folder / file).stat().st_mtime - age
            os.utime(folder / file, (written, written))
    assert newest_run().name == "between"
    with History(tmp_path / "ladder-runs" / "again", "fingerprint", {}):
        pass
    assert newest_run().name == "again"
    (tmp_path / "ladder-runs" / "again" / "lock").unlink()  # a copy may come without it
    assert newest_run().name == "between"


def test_explain_counts_what_was_tried_and_names_refusals_and_knobs_apart(run_folder: Path):
    with History(run_folder, "fingerprint", {}) as history:
        space = make_space("zero2", "zero3")
        refused = make_candidate("zero3", checkpointing=False, micro_batch=1, accumulation=16)
        outcome = Outcome(kind="host_oom", moment=REFUSED, sentence="refused", bytes_asked=1 << 50, bytes_free=1 << 40)
        refusal = replace(make_record(refused, trial="0003", outcome=outcome), tokens_per_second=None)
        turned = make_candidate("zero3", micro_batch=4, accumulation=4)
        turned = replace(turned, engine=replace(turned.engine, knobs=(("overlap_comm", True),)))
        history.add([refusal, fitting(space, turned, trial="0004")], space.by_key, {})
        statuses = {entry.candidate_key: entry.status for entry in ledger(space, history.records, {})}
    assert statuses[refused.key] == "refused"
    said = CliRunner().invoke(app, [str(run_folder)], catch_exceptions=False).stdout.splitlines()[-1]
    assert said.startswith("2 measured and 1 setting of knobs, ")
    assert said.endswith(" pruned, 1 refused")
