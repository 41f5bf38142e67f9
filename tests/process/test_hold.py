"""What takes hold of a script's training: it trains in any way, and nothing that follows its training runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.rehearsals import Rehearsals, rehearsals_of_held
from transformers.trainer_pt_utils import AcceleratorConfig

from ladder.errors import UsageError
from ladder.trial.script.trainer import own_config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, trial_environment: dict[str, str]) -> Iterator[Rehearsals]:
    """A folder with the scripts, which is also the working folder, and a server for all of them."""
    with rehearsals_of_held(tmp_path_factory.mktemp("held"), trial_environment) as held:
        yield held


@pytest.mark.parametrize("way", ["by_counting", "by_return", "by_exit", "in_a_thread", "in_a_generator"])
def test_nothing_that_follows_a_loop_runs_however_it_ends(way: str, home: Rehearsals) -> None:
    done = home.trial("leaves_its_loop.py", way, "4")
    assert done.made == frozenset()
    assert done.said.startswith("the script's training ended after 4 optimizer steps, before enough of them were ")


def test_an_error_in_a_loop_reaches_the_user_and_no_handler_of_the_script_s(home: Rehearsals) -> None:
    for proof in (False, True):
        done = home.trial("leaves_its_loop.py", "by_error", "4", proof=proof)
        assert done.said == "KeyError: 'loss'"
        assert re.search(r'leaves_its_loop\.py", line \d+, in by_error', done.traceback)
        assert done.made == frozenset()


def test_a_loop_within_the_loop_that_only_accumulates_is_not_its_end(home: Rehearsals) -> None:
    done = home.trial("leaves_its_loop.py", "accumulating", "400")
    assert (done.said, done.measured, done.made) == ("", 2, frozenset())


def test_what_a_loop_saves_in_a_trial_is_found_again_and_touches_nothing(home: Rehearsals) -> None:
    done = home.trial("saves_as_it_goes.py")
    assert (done.said, done.measured, done.made) == ("", 2, frozenset())
    assert done.log.count("read again after") >= 2, "once on each rank"
    assert not (home.home / "checkpoints").exists()


@pytest.mark.parametrize("way", ["loop", "trainer"])
def test_what_libraries_make_in_temporary_folders_stays_where_they_made_it(way: str, home: Rehearsals) -> None:
    done = home.trial("loads_in_workers.py", way, key="zero1 ckpt=off mb=4", proof=True)
    assert (done.said, done.measured, done.made) == ("", 2, frozenset())


def test_a_loop_is_held_at_its_first_backward_pass_and_not_where_it_reads_its_data(home: Rehearsals) -> None:
    done = home.trial("looks_at_its_data_first.py")
    assert (done.said, done.measured, done.made) == ("", 2, frozenset())
    assert "8 batches evaluated" in done.log, "what it reads meanwhile are its own batches, of a rank"


def test_a_trainer_that_is_stopped_is_measured_and_writes_nothing(home: Rehearsals) -> None:
    done = home.trial("stopped_trainer.py", "plateau", proof=True)
    assert (done.said, done.measured, done.made) == ("", 2, frozenset())
    assert done.log.count("evaluated\n") == 2, "once on each rank, when its steps are measured"


def test_an_error_in_a_trainer_reaches_the_user_and_nothing_follows(home: Rehearsals) -> None:
    done = home.trial("stopped_trainer.py", "fails", proof=True)
    assert (done.said, done.made) == ("TimeoutError: its time is over", frozenset())


def test_a_loop_that_computes_its_steps_is_told_the_candidate_s_micro_batch_and_plans_as_many(home: Rehearsals) -> None:
    done = home.trial("counts_its_steps.py", "known", key="zero2 ckpt=off mb=8")
    assert (done.said, done.measured, done.made) == ("", 2, frozenset())
    assert done.log.count("plans 400 steps") == 2, "64 samples, 16 in a step: as with the script's own settings"


@pytest.mark.parametrize(
    ("names", "said"),
    [("other", "its loop computes with the number of its batches"), ("by_hand", "its loop accumulates by hand")],
)
def test_a_loop_that_cannot_be_told_is_refused_with_the_reason(names: str, said: str, home: Rehearsals) -> None:
    done = home.trial("counts_its_steps.py", names, key=f"zero2 ckpt=off mb={8 if names == 'other' else 2}")
    assert done.said.startswith(said)
    assert done.made == frozenset()


def test_a_look_counts_with_all_ranks_of_the_training_as_the_script_does(home: Rehearsals) -> None:
    script = home.look("asks_all_ranks.py")
    assert (script.facts.micro_batch, script.facts.accumulation) == (4, 4)
    assert home.workload(script).global_batch_size == 32
    done = home.trial("asks_all_ranks.py")
    assert (done.said, done.measured, done.made) == ("", 2, frozenset())


@pytest.mark.parametrize("way", ["notebook", "debug", "fork"])
def test_a_script_that_starts_its_ranks_is_told_to_call_its_training_itself(way: str, home: Rehearsals) -> None:
    said = re.escape(
        "it starts its training, train(), in a process of its own; let the script call it itself, because "
    )
    with pytest.raises(UsageError, match=said):
        home.look("starts_ranks.py", way)


def test_a_script_that_calls_torchrun_is_told_which_command_to_give(home: Rehearsals) -> None:
    with pytest.raises(UsageError, match=r"give that command behind --: \S+ -u starts_ranks\.py helped"):
        home.look("starts_ranks.py", "torchrun")


def test_a_script_may_start_a_program_that_helps_it(home: Rehearsals) -> None:
    assert home.look("starts_ranks.py", "helped").facts.num_samples == 64


def test_a_module_of_the_script_s_own_is_tuned_without_checkpointing(home: Rehearsals) -> None:
    script = home.look("odd_trainer.py", "wrapped")
    assert (script.facts.model_class, script.facts.can_checkpoint) == ("Wrapped", False)
    assert not home.workload(script).model.checkpoints
    assert home.trial("odd_trainer.py", "wrapped").measured == 2


def test_an_evaluation_before_the_training_runs_where_the_model_is_whole(home: Rehearsals) -> None:
    done = home.trial("odd_trainer.py", "evaluates", key="zero1 ckpt=off mb=4")
    assert (done.said, done.measured, done.log.count("before: ")) == ("", 2, 2)
    done = home.trial("odd_trainer.py", "evaluates", key="zero3 ckpt=off mb=4")
    assert done.said.startswith("it evaluates before it trains, which the Trainer cannot do at stage 3 of ZeRO; ")


def test_the_schedule_of_a_script_s_deepspeed_configuration_stays(home: Rehearsals) -> None:
    script = home.look("odd_trainer.py", "scheduler")
    assert script.facts.overrides == ("its DeepSpeed configuration (its own, but its scheduler stays)",)
    assert "its schedule is WarmupLR" in home.trial("odd_trainer.py", "scheduler").log
    assert "its schedule is LambdaLR" in home.trial("odd_trainer.py").log


def test_a_model_that_an_accelerator_prepares_for_a_trainer_is_the_trainer_s(home: Rehearsals) -> None:
    done = home.trial("odd_trainer.py", "prepared", key="ddp ckpt=off mb=4")
    assert (done.said, done.measured) == ("", 2)


def test_batches_by_tokens_are_refused_by_the_look(home: Rehearsals) -> None:
    with pytest.raises(UsageError, match="its data loader decides on its batches itself"):
        home.look("odd_trainer.py", "by_tokens")


def test_a_look_finds_the_steps_that_a_script_plans_and_what_it_trains(home: Rehearsals) -> None:
    facts = home.look("odd_trainer.py").facts  # 64 samples twice, in batches of 4 on two ranks
    assert (facts.planned_steps, facts.schedule_steps, facts.weights) == (16, 16, "float32")
    facts = home.look("leaves_its_loop.py", "by_return", "9").facts
    assert (facts.planned_steps, facts.schedule_steps, facts.optimizer) == (None, 30, "AdamW")


def test_a_loop_that_goes_on_within_an_epoch_is_held_too(home: Rehearsals) -> None:
    done = home.trial("trains_on_part_of_it.py", "resumed")
    assert (done.said, done.measured) == ("", 2)


def test_a_loop_that_trains_on_other_data_than_it_said_is_no_trial(home: Rehearsals) -> None:
    done = home.trial("trains_on_part_of_it.py", "others")
    assert done.said.startswith("it trains on other batches than those of the loader that was prepared with its model")


def test_a_loader_whose_batches_accelerate_divides_gives_each_rank_the_candidate_s(home: Rehearsals) -> None:
    facts = home.look("trains_on_part_of_it.py", "divided").facts
    assert (facts.micro_batch, facts.accumulation) == (2, 1)
    done = home.trial("trains_on_part_of_it.py", "divided", key="zero2 ckpt=off mb=2", proof=True)
    assert (done.said, done.measured) == ("", 2)


def test_what_a_script_changes_of_its_arguments_later_counts_as_its_own(home: Rehearsals) -> None:
    script = home.look("odd_trainer.py", "late")
    assert (script.facts.micro_batch, script.facts.accumulation, home.workload(script).global_batch_size) == (2, 4, 16)
    done = home.trial("odd_trainer.py", "late", proof=True)  # which finds out another micro-batch than 4
    assert (done.said, done.measured) == ("", 2)


def test_what_a_script_says_to_accelerate_is_read_in_each_of_its_forms(tmp_path: Path) -> None:
    said = {"split_batches": True, "even_batches": False}
    (tmp_path / "own.json").write_text(json.dumps(said))
    for form in (said, AcceleratorConfig(**said), json.dumps(said), str(tmp_path / "own.json")):
        assert said.items() <= own_config(SimpleNamespace(accelerator_config=form)).items()
    assert own_config(SimpleNamespace(accelerator_config=None)) == own_config(SimpleNamespace()) == {}
