"""best_config.json: the DeepSpeed configuration of the answer, and a "ladder" section with its measurements."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from ladder.backends.registry import backend_of
from ladder.candidates import checkpointing_name, variant_name
from ladder.emit.answer import Answer
from ladder.errors import UsageError
from ladder.machine.host import environment_of_a_cpu_rank
from ladder.optimizers.registry import OPTIMIZERS
from ladder.techniques.keys import candidate_of
from ladder.techniques.registry import TECHNIQUES
from ladder.units import gib
from ladder.workload.workload import Dtype, ModelShape, Task, Workload

SCHEMA_VERSION = 1
"""Version of best_config.json's format. Chosen: it is increased when older versions would misread a file."""
SECTION = "ladder"

_WORDS = {"task": get_args(Task), "dtype": get_args(Dtype), "optimizer": OPTIMIZERS}
_PARTLY = {"lora", "load_in", "prepare_kbit", "freeze"}
_WORKLOAD = {*_WORDS, *_PARTLY, "seq_len", "global_batch_size", "gradient_clipping"}
_AUTO = re.compile(r"\\*auto")


def best_config(answer: Answer) -> dict[str, Any]:
    """The content of best_config.json: the backend's keys, then a "ladder" section, which DeepSpeed ignores.

    No string in it equals "auto", which accelerate would ask the user to fill in; see `original_text`. ValueError for
    an NVMe rung without an `nvme_path`.
    """
    candidate = answer.candidate
    # Absolute, because a relative path would depend on the folder in which training starts.
    nvme_path = None if answer.nvme_path is None else Path(os.path.abspath(answer.nvme_path))
    rung = candidate.engine.rung
    backend = backend_of(rung)
    config = backend.configuration(
        answer.workload,
        candidate.engine,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        world_size=answer.world_size,
        nvme_path=nvme_path,
    )
    config = backend.for_file(config, answer.workload, rung, answer.device, answer.learning_rate)
    document: dict[str, Any] = {**config, SECTION: _plain(_section(answer))}
    document[SECTION]["digest"] = _digest(document)
    return document


def launch_environment(answer: Answer) -> dict[str, str]:
    """Environment variables with which training runs as it was measured.

    Without OMP_NUM_THREADS, torchrun gives every rank one thread, and an optimizer step on the CPU is very slow.
    """
    engine = answer.candidate.engine
    environment = {"OMP_NUM_THREADS": str(answer.host_threads), **backend_of(engine.rung).environment(engine)}
    for technique in engine.techniques:
        environment |= technique.environment(answer.world_size)
    if answer.device == "cuda":
        return environment | answer.allocator
    # On a machine that has a GPU, DeepSpeed needs the first variable, and torch and accelerate the second.
    return environment | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", **environment_of_a_cpu_rank(os.environ)}


def to_json(document: Mapping[str, Any]) -> str:
    """`document` as readable JSON in its own key order; ASCII only, because DeepSpeed uses the locale's encoding."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def load_best_config(path: Path) -> dict[str, Any]:
    """The content of a best_config.json that ladder wrote and nobody has changed since.

    UsageError if it is missing, unreadable, not written by ladder, from a newer version, or edited, because then its
    measurements would not describe it. `original_text` undoes the escaping of texts in the "ladder" section.
    """
    where = repr(str(path))
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{where} does not exist; `ladder tune` writes it.") from None
    except OSError as error:
        raise UsageError(f"Cannot read {where}: {error.strerror or error}.") from error
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}.") from error
    except RecursionError:
        raise UsageError(f"{where} was not written by ladder: it is nested too deeply.") from None
    if isinstance(document, dict) and "from_pretrained" in document:
        raise UsageError(f"{where} says how to generate, and not how to train; the same `ladder tune` proves it again.")
    section = document.get(SECTION) if isinstance(document, dict) else None
    version = section.get("schema_version") if isinstance(section, dict) else None
    if not isinstance(section, dict) or type(version) is not int:
        raise UsageError(f"{where} was not written by ladder: it has no {SECTION!r} section with a schema_version.")
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{where} was written by a newer ladder (schema {version}, but this version reads up to {SCHEMA_VERSION}); "
            "upgrade ladder to read it."
        )
    if section.get("digest") != _digest(document):
        raise UsageError(
            f"{where} was changed after ladder wrote it, so its measurements no longer describe it; "
            "training with it works, but for this command run `ladder tune` again or restore the file."
        )
    if not _is_known(section):
        raise UsageError(
            f"{where} was written by a newer ladder, with settings that this version does not know; upgrade ladder."
        )
    return dict(document)


def candidate_key_in(section: Mapping[str, Any]) -> str:
    """The `Candidate.key` in a "ladder" section."""
    checkpointing = checkpointing_name(section["checkpoint_every"], section["offload_activations"])
    return f"{section['engine']} {variant_name(checkpointing, section['micro_batch'])}"


def original_text(text: str) -> str:
    r"""The text before escaping: `\auto` stands for `auto`, `\\auto` for `\auto`; other texts are not escaped."""
    return text[1:] if _AUTO.fullmatch(text) and text != "auto" else text


def model_folder(model: ModelShape) -> str | None:
    """The absolute path of the model's folder on this machine; None for a Hub model or a bundled shape."""
    path = Path(os.path.abspath(model.name))
    if model.source == "folder":
        return str(path)
    return str(path.parent) if model.source == "file" and path.name == "config.json" else None


def _section(answer: Answer) -> dict[str, Any]:
    workload, candidate, seen = answer.workload, answer.candidate, answer.measurement
    return {
        "schema_version": SCHEMA_VERSION,
        "rung": candidate.engine.rung.name,
        "engine": candidate.engine.key,
        **{technique.key: candidate.engine.has(technique) for technique in TECHNIQUES.values()},
        "gradient_checkpointing": candidate.gradient_checkpointing,
        "checkpoint_every": candidate.checkpoint_every,
        "offload_activations": candidate.offload_activations,
        "micro_batch": candidate.micro_batch,
        "accumulation": candidate.accumulation,
        "world_size": answer.world_size,
        "num_nodes": answer.num_nodes,
        "device": answer.device,
        "gpu": answer.gpu_name,
        "tokens_per_second": round(answer.tokens_per_second, 2),
        "tokens_per_second_range": _range(answer, 1, 2),
        "step_seconds": round(answer.step_seconds, 6),
        "mfu": None if answer.mfu is None else round(answer.mfu, 4),
        "bound_tokens_per_second": None if answer.bound is None else round(answer.bound, 1),
        "joules_per_token": None if seen.watts is None else round(seen.watts / answer.tokens_per_second, 6),
        **({} if seen.compile_seconds is None else {"compile_seconds": round(seen.compile_seconds, 2)}),
        "memory_per_gpu": {
            "peak_allocated_gib": gib(seen.peak_allocated),
            "peak_reserved_gib": gib(seen.peak_reserved),
            "peak_device_gib": gib(seen.peak_device),
            "outside_torch_gib": gib(seen.outside_torch),
            "limit_gib": gib(answer.memory_limit),
            "limit_bytes": answer.memory_limit,
            "limited": answer.is_limited,
        },
        "headroom": round(answer.headroom, 4),
        "host_memory_gib": gib(seen.peak_host),
        **_model_and_workload(workload),
        **_script(answer),
        **({} if answer.plain is None else {"plain": plain_summary(answer.plain)}),
        "proof": answer.proof,
        "warnings": answer.warnings,
        "environment": launch_environment(answer),
        "versions": answer.versions,
        "run_dir": os.path.abspath(answer.run_dir),
    }


def _range(answer: Answer, tokens: float, digits: int) -> list[float] | None:
    """The lowest and the highest promised speed, in units of so many tokens."""
    speeds = answer.tokens_per_second_range
    return None if speeds is None else [round(speed / tokens, digits) for speed in speeds]


def _model_and_workload(workload: Workload) -> dict[str, Any]:
    return {
        "model": {
            "name": workload.model.name,
            "source": workload.model.source,
            "model_type": workload.model.model_type,
            "num_parameters": workload.model.num_parameters,
            "num_trained": workload.weights.trained,
            "folder": model_folder(workload.model),
        },
        "workload": {
            "task": workload.task,
            "seq_len": workload.seq_len,
            "global_batch_size": workload.global_batch_size,
            "dtype": workload.dtype,
            "optimizer": workload.optimizer,
            "gradient_clipping": workload.gradient_clipping,
            **_partly_trained(workload),
        },
    }


def _partly_trained(workload: Workload) -> dict[str, Any]:
    """Adapters as the arguments of peft's LoraConfig, quantisation and frozen modules, as far as there are any."""
    said = {
        "lora": workload.lora.for_peft() if workload.lora is not None else None,
        "load_in": workload.load_in,
        "prepare_kbit": workload.prepare_kbit,
        "freeze": list(workload.freeze),
    }
    return {name: value for name, value in said.items() if value}


def _script(answer: Answer) -> dict[str, Any]:
    """The user's own script, where that is what was tuned."""
    script, seen = answer.workload.script, answer.measurement
    if script is None:
        return {}
    facts = script.facts
    completions = answer.workload.completions(answer.world_size)
    planned = facts.planned(answer.workload.global_batch_size, answer.world_size)
    return {
        "script": {
            "command": list(script.command),
            "kind": facts.kind,
            "sha256": facts.digest,
            "optimizer": facts.optimizer,
            "mean_tokens": round(facts.mean_tokens, 2),
            "samples_per_second": round(answer.tokens_per_second / facts.mean_tokens, 3),
            "samples_per_second_range": _range(answer, facts.mean_tokens, 3),
            "promised_device_gib": gib(answer.promised_device),
            **({} if answer.as_it_stands is None else {"as_it_stands": answer.as_it_stands}),
            "padding": None if seen.padding is None else round(seen.padding, 4),
            "loader_share": None if seen.loader_share is None else round(seen.loader_share, 4),
            **({} if completions is None else {"generation_batch_size": completions}),
            **({"options": dict(facts.options)} if facts.options else {}),
            **({"planned": asdict(planned)} if planned is not None else {}),
        }
    }


def plain_summary(answer: Answer) -> dict[str, Any]:
    """What a program has to know of an answer without DeepSpeed."""
    candidate = answer.candidate
    return {
        "rung": candidate.engine.rung.name,
        "engine": candidate.engine.key,
        "checkpoint_every": candidate.checkpoint_every,
        "micro_batch": candidate.micro_batch,
        "accumulation": candidate.accumulation,
        "tokens_per_second": round(answer.tokens_per_second, 2),
        "tokens_per_second_range": _range(answer, 1, 2),
        "peak_device_gib": gib(answer.measurement.peak_device),
    }


def _is_known(section: Mapping[str, Any]) -> bool:
    """Whether this version knows everything in the engine and the workload, so that it would run the same."""
    try:
        workload = section["workload"]
        candidate = candidate_of(candidate_key_in(section), workload["global_batch_size"])
        named = [workload[name] in words for name, words in _WORDS.items()]
        return candidate.engine.rung.name == section["rung"] and all(named) and workload.keys() <= _WORKLOAD
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def _plain(value: Any) -> Any:
    """`value` as JSON that accelerate can read: no "auto", no dots in keys (it splits keys there), no NaN."""
    if isinstance(value, Mapping):
        return {str(key).replace(".", "_"): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, Path)):
        text = str(value)
        return f"\\{text}" if _AUTO.fullmatch(text) else text
    return value


def _digest(document: Mapping[str, Any]) -> str:
    """Sixteen hex digits over everything except the digest itself, independent of the file's order and layout."""
    section = {key: value for key, value in document[SECTION].items() if key != "digest"}
    text = json.dumps({**document, SECTION: section}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
