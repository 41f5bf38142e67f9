"""The samples behind a script's data loader: which are longest, which are usual, and batches made of them."""

from __future__ import annotations

import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch

from ladder.trial.script.sample_sizes import arrow_lengths, holds_pictures, is_sequence, size_of
from ladder.trial.subject import Kind

_MOST = 20_000
"""Samples that are looked at. Chosen: enough for the longest of a usual data set; a larger one is looked at in part."""
_SECONDS = 10.0
"""For looking at samples. Chosen: about one trial's time."""
_GROUPS = 64
"""Batches whose mean length stands for the data's. Chosen: the mean of so many strays by a few percent only."""

_FEW = 8
"""Batches that are made to see how their samples are put together, or samples that are read to see whether they are
those of before. Chosen: a second's work at most."""


class WholeBatchesError(RuntimeError):
    """The loader's data set makes whole batches itself, so that no other micro-batch can be made."""

    is_sentence = True


class Samples:
    """Up to 20,000 samples of a loader, in the order in which it would give them.

    `size` says how long a sample is, where that is more than what is in it. `known` are the sizes that an earlier look
    found, by index, if it had to read the samples one by one.
    """

    def __init__(
        self, loader: Any, size: Callable[[Any], int] | None = None, known: Mapping[int, int] | None = None
    ) -> None:
        dataset = loader.dataset
        sampler = getattr(loader, "batch_sampler", None)
        self._collate = loader.collate_fn
        if isinstance(dataset, torch.utils.data.IterableDataset):
            if loader.batch_size is None:
                raise WholeBatchesError("its data set gives whole batches")
            self.total: int | None = None
            self._source: Any = _read(dataset)
            order: Iterable[int] = range(len(self._source))
        else:
            if sampler is None:
                raise WholeBatchesError("its data loader gives whole batches")
            self.total, self._source = len(dataset), dataset
            order = chain.from_iterable(sampler)
        lengths = arrow_lengths(self._source) if size is None else None
        self.read_singly: dict[int, int] = {}
        """The sizes, where each sample had to be read for its own."""
        if lengths is None:
            self.read_singly = self._known(known or {}, size) or self._read_sizes(size)
        self.sizes: dict[int, int] = self.read_singly if lengths is None else dict(enumerate(lengths))
        self._order = [index for index in islice(order, _MOST) if index in self.sizes]
        if not self._order:
            raise WholeBatchesError("its data set is empty")
        self.longest_first = sorted(self.sizes, key=self.sizes.__getitem__, reverse=True)
        # By the samples of a batch:
        self._ordered: dict[int, list[list[int]]] = {}
        self._lengths: dict[int, dict[int, list[int]]] = {}
        self._to_come: dict[int, Iterator[list[int]]] = {}
        """Those whose length no batch had before."""

    @property
    def are_alike(self) -> bool:
        """All are of one size, as where each is padded to the same length."""
        return len(set(self.sizes.values())) == 1

    def batch(self, count: int, kind: Kind) -> Any:
        """One of `count` samples; after a new one for each length that batches have, their lengths come again."""
        if kind == "longest":
            return self.longest(count)
        if kind == "usual":
            return self.usual(count)
        if count not in self._to_come:
            groups = list(self._by_length(count).values())
            self._to_come[count] = cycle(groups[1:] or groups)
        return self._batch(next(self._to_come[count]))

    def share_of_new_lengths(self, count: int) -> float:
        """Of an epoch's batches of `count` samples: those whose length none before had; 0 if all have one length."""
        lengths = len(self._by_length(count))
        return lengths / len(self._groups(count)) if lengths > 1 else 0.0

    def longest(self, count: int) -> Any:
        """The batch of the `count` longest samples."""
        return self._batch(_cycled(self.longest_first, count))

    def usual(self, count: int) -> Any:
        """A batch of `count` samples that is as long as they are on average."""
        return self._batch(self._most_usual_first(count)[0])

    def padded_tokens(self, count: int) -> float:
        """Tokens of a batch of `count` samples on average, padding included, as the model gets them.

        Batches are padded to their longest sample, or packed; a few of them show which.
        """
        groups = self._groups(count)
        longest = [count * max(self.sizes[index] for index in group) for group in groups]
        whole = [sum(self.sizes[index] for index in group) for group in groups]
        seen = random.Random(0).sample(range(len(groups)), min(_FEW, len(groups)))
        tokens = {place: count_tokens(self._batch(groups[place]))[1] for place in seen}
        measures = (longest, whole)
        ratios = [[tokens[place] / max(measure[place], 1) for place in seen] for measure in measures]
        steadier = min((0, 1), key=lambda which: statistics.pstdev(ratios[which]) / statistics.fmean(ratios[which]))
        return statistics.fmean(measures[steadier]) * statistics.fmean(ratios[steadier])

    def _groups(self, count: int) -> list[list[int]]:
        """The samples in the loader's order, as batches of `count`."""
        starts = range(0, len(self._order) - count + 1, count)
        return [self._order[start : start + count] for start in starts] or [_cycled(self._order, count)]

    def _by_length(self, count: int) -> dict[int, list[int]]:
        """By the length of a batch: the one nearest to the usual, which comes first."""
        if count not in self._lengths:
            groups, length = self._most_usual_first(count), self._length_of(count)
            found = self._lengths[count] = {}
            for group in groups:
                found.setdefault(length(group), group)
        return self._lengths[count]

    def _length_of(self, count: int) -> Callable[[list[int]], int]:
        """Tells groups apart by the length of their batch, which a few of them show: padded to a multiple, or packed.

        Where batches have no `input_ids`, or pictures, which take long to collate, all are taken for alike.
        """
        if holds_pictures(self._source[self._order[0]]):
            return lambda group: 0
        groups = self._groups(count)
        seen = random.Random(0).sample(groups, min(_FEW, len(groups)))
        try:
            shapes = [shape_of(self._batch(group)) for group in seen]
        except WholeBatchesError:
            return lambda group: 0
        step = max(1, math.gcd(*(length for _, length in shapes)))
        measure: Callable[[Iterable[int]], int] = max if all(rows % count == 0 for rows, _ in shapes) else sum
        return lambda group: math.ceil(measure(self.sizes[index] for index in group) / step)

    def _most_usual_first(self, count: int) -> list[list[int]]:
        if count not in self._ordered:  # a loop's trial asks before each micro-step
            self._ordered[count] = self._by_usualness(count)
        return self._ordered[count]

    def _by_usualness(self, count: int) -> list[list[int]]:
        groups = self._groups(count)
        longest = [max(self.sizes[index] for index in group) for group in groups]
        whole = [sum(self.sizes[index] for index in group) for group in groups]
        usual_longest, usual_whole = statistics.fmean(longest), statistics.fmean(whole)
        ordered = sorted(
            zip(groups, longest, whole, strict=True),
            key=lambda each: abs(each[1] / usual_longest - 1) + abs(each[2] / usual_whole - 1),
        )
        return [group for group, _, _ in ordered]

    def _batch(self, indices: Sequence[int]) -> Any:
        return self._collate([copy.copy(self._source[index]) for index in indices])  # a collator may take them apart

    def _known(self, known: Mapping[int, int], size: Callable[[Any], int] | None) -> dict[int, int]:
        """`known`, if the samples are still those; else nothing."""
        if self.total is None or not known or max(known) >= self.total:
            return {}
        seen = list(known)[:_FEW]
        return dict(known) if all(self._size(index, size) == known[index] for index in seen) else {}

    def _read_sizes(self, size: Callable[[Any], int] | None) -> dict[int, int]:
        """By index: how much there is of a sample, in tokens, numbers or letters; it orders samples by length."""
        whole = len(self._source)
        indices = range(whole) if whole <= _MOST else sorted(random.Random(0).sample(range(whole), _MOST))
        if size is None and whole and holds_pictures(self._source[0]):
            indices = random.Random(0).sample(indices, len(indices))  # the time may not be enough for all
        began, sizes = time.monotonic(), {}
        for index in indices:
            sizes[index] = self._size(index, size)
            if time.monotonic() - began > _SECONDS:
                break
        return sizes

    def _size(self, index: int, size: Callable[[Any], int] | None) -> int:
        sample = self._source[index]
        if size is not None:
            return size(sample)
        # Only the script's collator knows how many tokens an image makes.
        return count_tokens(self._batch([index]))[0] if holds_pictures(sample) else size_of(sample)

    def mean_tokens(self) -> float:
        """Of a sample, without padding: of usual batches of one."""
        sample = random.Random(0).sample(self._order, min(_GROUPS, len(self._order)))
        tokens = [count_tokens(self._batch([index]))[0] for index in sample]
        sizes = [self.sizes[index] for index in sample]
        # What the model gets of a sample is in proportion to its size, which is known of many more.
        return sum(tokens) / sum(sizes) * statistics.fmean(self.sizes[index] for index in self._order)


def rebatched(loader: Any, micro_batch: int) -> Any:
    """A loader as `loader` in all but the micro-batch. WholeBatchesError where it has none."""
    if loader.batch_size is None:
        raise WholeBatchesError("its data loader decides on its batches itself")
    streams = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    workers = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return torch.utils.data.DataLoader(
        loader.dataset,
        batch_size=micro_batch,
        sampler=None if streams else loader.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **(workers if loader.num_workers else {}),
    )


def require_batch_size(loader: Any) -> None:
    """WholeBatchesError for a loader whose batches have no certain number of samples."""
    sampler = getattr(loader, "batch_sampler", None)
    streams = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if sampler is not None and not streams and getattr(sampler, "batch_size", None) is None:
        raise WholeBatchesError("its data loader decides on its batches itself")


def count_tokens(batch: Any) -> tuple[int, int]:
    """Tokens that the model gets of `batch`, without padding and with it."""
    if not isinstance(batch, Mapping):
        shapes = [each.shape for each in batch if isinstance(each, torch.Tensor)] if is_sequence(batch) else []
        whole = max((shape.numel() for shape in shapes), default=1)
        return whole, whole
    masks = [value for name, value in batch.items() if name.endswith("attention_mask") and torch.is_tensor(value)]
    ids = [value for name, value in batch.items() if name.endswith("input_ids") and torch.is_tensor(value)]
    whole = sum(each.numel() for each in (ids or masks))
    if masks and sum(each.numel() for each in masks) == whole:
        return int(sum(int((each != 0).sum()) for each in masks)), whole
    return whole, whole


def shape_of(batch: Any) -> tuple[int, int]:
    """Sequences in `batch`, and tokens of the longest."""
    tensors = (
        [value for name, value in batch.items() if name.endswith("input_ids")] if isinstance(batch, Mapping) else []
    )
    two = [each for each in tensors if torch.is_tensor(each) and each.dim() == 2]
    if not two:
        raise WholeBatchesError("its batches have no input_ids of two dimensions")
    return sum(each.shape[0] for each in two), max(each.shape[1] for each in two)


def _read(dataset: Iterable[Any]) -> list[Any]:
    began, items = time.monotonic(), []
    for item in islice(dataset, _MOST):
        items.append(item)
        if time.monotonic() - began > _SECONDS:
            break
    return items


def _cycled(indices: Sequence[int], count: int) -> list[int]:
    return [indices[position % len(indices)] for position in range(count)]
