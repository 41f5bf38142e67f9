"""accelerate: the file for `accelerate launch --config_file`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.emit.accelerate import accelerate_config, to_yaml
from ladder.emit.exporters.base import Exporter, as_text, warning_comments
from ladder.emit.settings import Settings


class Accelerate(Exporter):
    name = "accelerate"

    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        return as_text(warning_comments(settings)) + to_yaml(accelerate_config(settings, config))
