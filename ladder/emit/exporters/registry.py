"""All exporters. A new one is added here, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.emit.config import SECTION
from ladder.emit.exporters.accelerate import Accelerate
from ladder.emit.exporters.axolotl import Axolotl
from ladder.emit.exporters.base import Exporter
from ladder.emit.exporters.deepspeed import DeepSpeedOnly
from ladder.emit.exporters.llama_factory import LlamaFactory
from ladder.emit.exporters.sbatch import Sbatch
from ladder.emit.exporters.torchrun import Torchrun
from ladder.emit.exporters.trainer import Trainer
from ladder.emit.exporters.trl import Trl
from ladder.emit.settings import settings_in
from ladder.registry import Registry

EXPORTERS = Registry[Exporter](
    Trainer(), Accelerate(), DeepSpeedOnly(), Axolotl(), LlamaFactory(), Trl(), Torchrun(), Sbatch()
)


def exported(document: Mapping[str, Any], config: Path, target: str) -> str:
    """The text of the exporter named `target`, made from the content of the best_config.json at `config`.

    UsageError if the program does not train such models, or has no settings for the answer.
    """
    exporter, settings = EXPORTERS[target], settings_in(document)
    config = config.absolute()
    exporter.require_possible(settings, document[SECTION]["workload"]["task"], config)
    return exporter.text(settings, document, config)
