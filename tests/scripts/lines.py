"""The texts of a file and how they are padded, for the loops beside this file."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.utils.data import Dataset


class Lines(Dataset[list[int]]):
    """The texts of a jsonl file as token ids, cut to `longest`."""

    def __init__(self, path: str, tokenizer: Any, longest: int) -> None:
        with open(path) as file:
            texts = [json.loads(line)["text"] for line in file]
        self.ids: list[list[int]] = [tokenizer(text)["input_ids"][:longest] for text in texts]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> list[int]:
        return self.ids[index]


def pad(samples: list[list[int]], filler: int) -> dict[str, torch.Tensor]:
    width = max(len(ids) for ids in samples)
    ids = torch.tensor([each + [filler] * (width - len(each)) for each in samples])
    mask = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
