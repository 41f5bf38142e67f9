"""What crosses from process to process is read as it was written, or not at all."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import tiny_trial
from helpers.events import measured_event
from helpers.scripts import make_script

from ladder.events.as_json import NotReadError, from_json, to_json
from ladder.events.protocol import MeasuredEvent, ScriptSpec, Share, TrialSpec, parse_event
from ladder.workload.script import OwnTraining

FACTS = make_script(sizes={0: 31, 12: 32}, overrides=("FSDP",), num_samples=None).facts
PLANNED = OwnTraining(micro_batch=2, accumulation=4, optimizer_steps=None, schedule_steps=9, samples=None, trainable=7)


def test_a_trial_of_a_script_is_read_as_it_was_written() -> None:
    script = ScriptSpec(command=("train.py", "é"), facts=FACTS, planned=PLANNED)
    share = Share(first=1, count=2, address="node1")
    spec = replace(tiny_trial(Path("/run"), 1, 2), script=script, share=share, gpu_uuids=("GPU-0",), stop_at=1.5)
    assert from_json(TrialSpec, to_json(spec, indent=1)) == spec


def test_a_number_that_is_infinite_or_none_at_all_does_not_make_a_report_unreadable() -> None:
    event = measured_event("zero2 ckpt=off mb=1", losses=[math.inf, 9.0])
    assert parse_event(to_json(event).encode()) == event
    (read,) = [parse_event(to_json(replace(event, losses=[math.nan])))]
    assert isinstance(read, MeasuredEvent)
    assert math.isnan(read.losses[0])


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        '{"t": 1.0}',
        '{"kind": "unheard-of", "t": 1.0}',
        '{"kind": ["done"], "t": 1.0}',
        '{"kind": "done"}',
        '{"kind": "done", "t": "now"}',
        '{"kind": "done", "t": true}',
        '{"kind": "done", "t": 1.0, "more": 1}',
        '{"kind": "phase", "t": 1.0, "phase": "lunch"}',
        '{"kind": "step", "t": 1.0, "candidate": null, "seconds": 1.0}',
        json.dumps({"kind": "looked", "t": 1.0, "facts": {"kind": "trainer"}}),
    ],
)
def test_a_line_that_says_something_else_is_not_read(line: str) -> None:
    with pytest.raises(NotReadError):
        parse_event(line)


def test_a_whole_number_stands_for_one_with_a_fraction_and_not_the_reverse() -> None:
    assert parse_event('{"kind": "done", "t": 1}').t == 1.0
    with pytest.raises(NotReadError):
        from_json(Share, '{"first": 1.0, "count": 2, "address": ""}')
