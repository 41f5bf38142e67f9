"""Models whose layers bitsandbytes holds in fewer bits, as a rank builds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import TINY_CONFIG, tiny_trial

from ladder.trial.model_class import auto_class, model_config
from ladder.trial.quantised import quantised_model


@pytest.mark.parametrize("load_in", ["4bit", "8bit"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_shares_the_weights_of_the_embeddings_where_the_model_ties_them(
    tmp_path: Path, load_in: str, tied: bool
) -> None:
    raw = TINY_CONFIG | {"tie_word_embeddings": tied}
    spec = tiny_trial(tmp_path, 1, rung="zero0").model_copy(update={"load_in": load_in, "model_config_json": raw})
    config = model_config(raw)
    model = quantised_model(auto_class(config, "causal-lm"), config, spec, torch.bfloat16)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is table.weight) == tied
