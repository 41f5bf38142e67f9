"""The options of tune, plan, scale and verify. Written by scripts/arguments.py from what is declared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from ladder.techniques.switches import Switches

class TuneArguments(Switches, total=False):
    script: str | Sequence[str]
    map: str | Sequence[str]
    task: Literal["causal-lm", "masked-lm", "seq2seq-lm", "generate"] | None
    seq_len: int | None
    global_batch_size: int | None
    dtype: Literal["bf16", "fp16", "fp32"] | None
    optimizer: Literal["adamw", "adam", "sgd"]
    lora: str | None
    lora_file: Path | str | None
    load_in: Literal["4bit", "8bit"] | None
    prepare_kbit: bool
    freeze: str | Sequence[str]
    python: str
    prompt_len: int | None
    new_tokens: int | None
    batches: int | Sequence[int]
    ways: str | Sequence[str]
    gradient_clipping: float
    gpus: int | None
    nodes: int | None
    hostfile: Path | str | None
    gpu_memory: int | str | None
    host_memory: int | str | None
    nvme_path: Path | str | None
    wait: bool
    launcher: Literal["local", "ray", "simulated"]
    machine: str | None
    time_budget: float | str | None
    strategy: Literal["auto", "exhaustive", "walk", "reverse", "bisect"]
    tolerance: float
    knobs: int | None
    rungs: str | Sequence[str]
    micro_batches: int | Sequence[int]
    cold: bool
    backend: Literal["deepspeed", "torch", "all"]
    documented: bool
    allow: str | Sequence[str]
    run_dir: Path | str | None
    output: Path | str
    with_optimizer: float | None
    save_weights: Path | str | None

class PlanArguments(Switches, total=False):
    script: str | Sequence[str]
    map: str | Sequence[str]
    task: Literal["causal-lm", "masked-lm", "seq2seq-lm", "generate"] | None
    seq_len: int | None
    global_batch_size: int | None
    dtype: Literal["bf16", "fp16", "fp32"] | None
    optimizer: Literal["adamw", "adam", "sgd"]
    lora: str | None
    lora_file: Path | str | None
    load_in: Literal["4bit", "8bit"] | None
    prepare_kbit: bool
    freeze: str | Sequence[str]
    python: str
    gpu_memory: int | str | None
    host_memory: int | str | None
    machine: str | None
    allow: str | Sequence[str]
    prompt_len: int | None
    new_tokens: int | None
    batches: int | Sequence[int]
    ways: str | Sequence[str]
    gpus: int | None

class ScaleArguments(Switches, total=False):
    script: str | Sequence[str]
    map: str | Sequence[str]
    task: Literal["causal-lm", "masked-lm", "seq2seq-lm", "generate"] | None
    seq_len: int | None
    global_batch_size: int | None
    dtype: Literal["bf16", "fp16", "fp32"] | None
    optimizer: Literal["adamw", "adam", "sgd"]
    lora: str | None
    lora_file: Path | str | None
    load_in: Literal["4bit", "8bit"] | None
    prepare_kbit: bool
    freeze: str | Sequence[str]
    python: str
    gpu_memory: int | str | None
    host_memory: int | str | None
    machine: str | None
    allow: str | Sequence[str]
    gpus: str
    price: float | None

class VerifyArguments(TypedDict, total=False):
    script: str | Sequence[str]
    steps: int | None
    minutes: float | None
    tolerance: float
    hostfile: Path | str | None
    launcher: Literal["local", "ray"]
    python: str
