"""A list of modules stands for all of a model's, also where a probe has fewer layers."""

from __future__ import annotations

from typing import Any

from ladder.workload.modules import expanded, with_fewer_layers

_LINEAR = {"kind": "linear", "inputs": 4, "outputs": 8, "elements": 32}
ROWS: list[dict[str, Any]] = [
    {"name": "embed", "kind": "table", "inputs": 10, "outputs": 4, "elements": 40, "also": ["head"]},
    {"name": "encoder.*.net", **_LINEAR, "layer": 0, "at": [[[0, 2]]]},
    {"name": "decoder.*.experts.*.net", **_LINEAR, "layer": 3, "share": 0.5, "at": [[[0, 0], [2, 2]], [[0, 1]]]},
    {"name": "tower.*.net", **_LINEAR, "share": 0.0, "at": [[[0, 1]]]},
]


def test_each_number_in_a_name_takes_all_its_values_and_the_first_is_the_layer() -> None:
    modules = expanded(ROWS)
    assert [(each.name, each.layer) for each in modules[1:4]] == [(f"encoder.{n}.net", n) for n in range(3)]
    assert [(each.name, each.layer) for each in modules[4:8]] == [
        (f"decoder.{layer}.experts.{expert}.net", 3 + layer) for layer in (0, 2) for expert in (0, 1)
    ]
    assert [each.layer for each in modules[8:]] == [None, None]
    assert modules[0].also == ("head",)


def test_fewer_layers_take_the_later_ones_of_each_stack_away_and_no_others() -> None:
    left = expanded(with_fewer_layers(ROWS, 2))
    assert [(each.name, each.layer) for each in left] == [
        ("embed", None),
        ("encoder.0.net", 0),
        ("encoder.1.net", 1),
        ("decoder.0.experts.0.net", 2),
        ("decoder.0.experts.1.net", 2),
        ("tower.0.net", None),
        ("tower.1.net", None),
    ]
