"""The Hugging Face Trainer: its arguments, for HfArgumentParser.parse_json_file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.emit.exporters.base import Exporter
from ladder.emit.settings import Settings
from ladder.emit.trainer import trainer_arguments


class Trainer(Exporter):
    name = "trainer"

    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        return json.dumps(trainer_arguments(settings, config), indent=2) + "\n"
