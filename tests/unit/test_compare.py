"""The comparison with other tools: what is run again, which columns follow, and how an Autotuner's folder is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from autotuner import read_results
from side_by_side import Ended
from unmodified import Training, logged_steps, tried_sizes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the Autotuner of DeepSpeed 0.19.8 left of a fast search on two CPU ranks, without its logs."""
    shutil.copytree(Path(__file__).parents[1] / "data" / "autotuner", tmp_path / "autotuner")
    return tmp_path / "autotuner"


def test_the_autotuner_s_own_choice_is_read_without_its_section(folder: Path) -> None:
    read = read_results(folder)
    assert (read["experiments"], read["failures"], read["finished"]) == (6, 0, True)
    assert read["chosen"]["zero_optimization"] == {"stage": 2}
    assert read["chosen"]["train_micro_batch_size_per_gpu"] == 2
    assert "autotuning" not in read["chosen"]
    assert len(read["samples_per_second"]) == 6
    assert read["samples_per_second"]["z3_gas1_tmbspg2"] == pytest.approx(28.33, abs=0.01)


LOG = """1.0 Total train batch size (w. parallel, distributed & accumulation) = 1,024
1.5 torch.OutOfMemoryError: CUDA out of memory.
2.0 Total train batch size (w. parallel, distributed & accumulation) = 512
10.0 {'loss': '6.209', 'grad_norm': '12', 'num_tokens': '1.5e+04', 'epoch': '0.002'}
12.0 {'loss': '6.206', 'grad_norm': '12', 'num_tokens': '2.5e+04', 'epoch': '0.004'}
15.0 {'loss': '6.206', 'grad_norm': '12', 'num_tokens': '3.5e+04', 'epoch': '0.006'}
15.1 {'train_runtime': '10.07', 'train_loss': '6.213', 'epoch': '0.006'}
"""


def test_a_program_s_own_logging_gives_the_speed_after_its_first_step() -> None:
    training = Training(5.0, Ended(0, 20.0, LOG), 7.5, logged_steps(LOG))
    assert training.tokens_per_second == 4000.0
    assert training.seconds == 10.0  # what it does after its last step is left out
    assert training.why is None
    assert training.real(8) == {
        "steps": 3,
        "tokens_per_second": 4000.0,
        "micro_batch": 8,
        "peak_device_gib": 7.5,
    }
    failed = Training(5.0, Ended(1, 20.0, LOG), 7.5, logged_steps(LOG))
    assert (failed.tokens_per_second, failed.why, failed.real(8)) == (None, "out of memory", None)
    assert tried_sizes(LOG, gpus=2) == [512, 256]
