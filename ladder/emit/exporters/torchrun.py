"""torchrun: a script that starts a Trainer script on this host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.emit.exporters.base import Exporter, as_text, export_lines, launch_line, warning_comments
from ladder.emit.nodes import finding
from ladder.emit.settings import Settings


class Torchrun(Exporter):
    name = "torchrun"

    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        lines = [
            "#!/usr/bin/env bash",
            *warning_comments(settings),
            "# Usage: bash this-file train.py [its arguments], for a script with the Hugging Face Trainer.",
            "set -euo pipefail",
            "if [ $# -eq 0 ]; then",
            '  echo "usage: bash $0 train.py [its arguments]" >&2',
            "  exit 2",
            "fi",
            *export_lines(settings),
            *finding(settings.num_nodes),
            launch_line(settings, config),
        ]
        return as_text(lines)
