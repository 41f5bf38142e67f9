"""What unmodified programs train on: model folders, texts of uneven lengths, and the peak of a GPU's memory meanwhile.

`promise.py` and `unmodified.py` share this.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import pynvml

from ladder.launch.counting import counting
from ladder.machine.gpus import visible_gpus
from ladder.units import gib
from ladder.workload.shapes import with_layers
from ladder.workload.source import resolve_model

_ROWS = 4000
"""Of each data set. Chosen: more than all steps of a run take."""
_WORDS = 2000


def made_model(folder: Path, name: str, layers: int | None) -> Path:
    """The folder of a model, made once, by a process of its own, which gives the GPU back."""
    target = folder / f"{Path(name).name.removesuffix('.json')}-{layers or 'all'}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(_make_model, Path(unfinished) / "model", name, layers).result()
        with suppress(OSError):  # another benchmark was sooner
            (Path(unfinished) / "model").rename(target)
    return target


def _make_model(target: Path, name: str, layers: int | None) -> None:
    """A folder with random weights of the bundled shape, and a tokenizer of whole words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    shape = resolve_model(name, count=counting())
    raw = dict((with_layers(shape, layers) if layers else shape).config)
    fields = {key: value for key, value in raw.items() if key not in ("model_type", "torch_dtype", "dtype")}
    config = AutoConfig.for_model(raw["model_type"], **fields)
    # A CPU draws a billion values in most of a minute.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(target)
    words = ["<pad>", "<eos>", "<unk>", "<bos>", *(f"w{number}" for number in range(_WORDS))][: config.vocab_size]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<bos>"
    ).save_pretrained(target)


def make_data(folder: Path) -> None:
    """Texts of 20 to 1,200 words, most of them short, as people write; each file is made once."""
    source = random.Random(0)

    def text() -> str:
        length = min(1200, max(20, round(source.lognormvariate(5.3, 0.9))))
        return " ".join(f"w{source.randrange(_WORDS)}" for _ in range(length))

    rows: dict[str, list[dict[str, str]]] = {
        "text": [{"text": text()} for _ in range(_ROWS)],
        "pairs": [{"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(_ROWS)],
        "prompts": [{"prompt": " ".join(text().split()[:200])} for _ in range(_ROWS)],
    }
    for name, lines in rows.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        if not (folder / name / "train.jsonl").exists():
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as unfinished:
                unfinished.write("".join(json.dumps(line) + "\n" for line in lines))
            Path(unfinished.name).rename(folder / name / "train.jsonl")


class Peak:
    """Samples the first GPU's memory until it is stopped."""

    def __init__(self) -> None:
        self._peak, self._over = 0, threading.Event()
        self._handle = None
        if visible_gpus():
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(visible_gpus()[0].uuid)
        self._before = self._used()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _used(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used) if self._handle is not None else 0

    def _sample(self) -> None:
        while not self._over.wait(0.02):
            self._peak = max(self._peak, self._used() - self._before)

    def stop(self) -> float:
        self._over.set()
        self._thread.join()
        return gib(self._peak) or 0.0
