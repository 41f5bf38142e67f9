"""DeepSpeed: only its own keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.backends.registry import MAIN
from ladder.emit.config import SECTION
from ladder.emit.exporters.base import Exporter
from ladder.emit.settings import Settings
from ladder.errors import UsageError


class DeepSpeedOnly(Exporter):
    name = "deepspeed"

    def require_possible(self, settings: Settings, task: str, config: Path) -> None:
        super().require_possible(settings, task, config)
        if settings.backend is not MAIN:
            raise UsageError("--for deepspeed: the answer trains without DeepSpeed; use --for accelerate or trainer.")

    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        return json.dumps({key: value for key, value in document.items() if key != SECTION}, indent=2) + "\n"
