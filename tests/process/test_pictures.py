"""What is found in samples with images: only the script's own collator knows how many tokens an image makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ladder.trial.script.sample_sizes import holds_pictures
from ladder.trial.script.samples import Samples, shape_of


@dataclass(frozen=True)
class Picture:
    """A stand-in for one of Pillow's: it says nothing of tokens."""

    height: int
    width: int


class Collator:
    """As TRL's for Qwen2-VL: it takes samples apart, and puts the patches of all images into one tensor."""

    def __init__(self) -> None:
        self.num_samples = 0

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.num_samples += len(samples)
        pictures = [sample.pop("image") for sample in samples]
        grids = torch.tensor([[each.height, each.width] for each in pictures])
        tokens = [grid.prod() + len(sample["text"].split()) for grid, sample in zip(grids, samples, strict=True)]
        mask = torch.tensor([[place < number for place in range(max(tokens))] for number in tokens])
        patches = torch.zeros(int(grids.prod(1).sum()), 3)
        return {"input_ids": mask.long(), "attention_mask": mask.long(), "pixel_values": patches, "grid": grids}


def sample(height: int, width: int, words: int) -> dict[str, Any]:
    return {"image": Picture(height, width), "text": "word " * words}


SAMPLES = [sample(2, 2, 50), sample(8, 8, 5), sample(6, 6, 30), sample(1, 1, 1)]
TOKENS = [54, 69, 66, 2]


def samples_of(collate: Collator, rows: list[dict[str, Any]] = SAMPLES, known: dict[int, int] | None = None) -> Samples:
    return Samples(DataLoader(rows, batch_size=2, collate_fn=collate), known=known)  # type: ignore[arg-type]


def test_samples_are_ordered_by_the_tokens_of_text_and_image_together() -> None:
    samples = samples_of(Collator())
    assert [samples.sizes[index] for index in range(4)] == TOKENS
    assert samples.longest_first == [1, 2, 0, 3]
    assert samples.mean_tokens() == pytest.approx(sum(TOKENS) / 4)


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_a_batch_of_another_size_is_made_by_the_script_s_own_collator(count: int) -> None:
    batch = samples_of(Collator()).longest(count)
    assert shape_of(batch) == (count, 69)
    assert len(batch["grid"]) == count
    assert len(batch["pixel_values"]) == int(batch["grid"].prod(1).sum())


def test_a_collator_may_take_samples_apart_again_and_again() -> None:
    samples = samples_of(Collator())
    for _ in range(2):
        samples.longest(9)
    assert all("image" in each for each in SAMPLES)


def test_a_trial_takes_the_sizes_over_that_the_look_found() -> None:
    looked, collate = samples_of(Collator()), Collator()
    rows = SAMPLES * 50
    known = {index: looked.sizes[index % 4] for index in range(len(rows))}
    assert samples_of(collate, rows, known).sizes == known
    assert collate.num_samples < 10


@pytest.mark.parametrize("known", [{0: 54, 1: 68}, {0: 54, 4: 54}])
def test_sizes_of_other_samples_are_not_taken_over(known: dict[int, int]) -> None:
    assert samples_of(Collator(), known=known).longest_first == [1, 2, 0, 3]


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        ({"input_ids": [1, 2], "labels": [1, 2], "score": 0.5, "name": "a", "none": None}, False),
        ({"input_ids": torch.ones(3), "mask": torch.ones(3, 3)}, False),
        ({"messages": [{"role": "user", "content": "word"}]}, False),
        ({"messages": [{"content": [{"image": Picture(1, 1)}]}]}, True),
        ({"image": {"bytes": b"\x89PNG", "path": None}}, True),
        ({"array": torch.ones(3, 8, 8)}, True),
        ({"input_ids": [1], "pixel_values": [[0.0]]}, True),
    ],
)
def test_texts_and_numbers_are_no_pictures(value: Any, holds: bool) -> None:
    assert holds_pictures(value) == holds


def test_the_messages_of_a_data_set_are_as_long_as_their_texts() -> None:
    datasets = pytest.importorskip("datasets")
    talks = [[{"role": "user", "content": "word " * number}] for number in (3, 9, 1)]
    rows = datasets.Dataset.from_dict({"messages": talks, "places": [["a", "b", "c", "d"], [], []]})
    assert samples_of(Collator(), rows).longest_first == [1, 0, 2]
