"""best_generation.json, the script that uses it, and what launches that."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.emit.config import SECTION, to_json
from ladder.emit.files import OutputPaths
from ladder.generating.search import Tried, reference_of, share_that_differs
from ladder.generating.ways import WAYS_BY_NAME, Generation, Way, deepspeed_of, from_pretrained
from ladder.machine.host import environment_of_a_cpu_rank
from ladder.machine.interpreter import ranks_python
from ladder.units import format_bytes

SERVING = (
    "For many requests at once, a serving engine such as vLLM or SGLang is many times faster; these ways are for a "
    "script of your own, and for a model that does not fit otherwise."
)


@dataclass(frozen=True, kw_only=True)
class GenerationAnswer:
    """The proven way, and all that its files say of it. `model` is what `from_pretrained` reads: a folder or an id, or
    empty where only a shape is known."""

    problem: Generation
    proof: Tried
    model: str
    tried: Sequence[Tried]
    left_out: Mapping[str, str]

    @property
    def way(self) -> Way:
        return WAYS_BY_NAME[self.proof.way]

    @property
    def processes(self) -> int:
        return self.way.processes(self.problem.machine.world_size)

    def compared(self) -> tuple[str, float]:
        """The way with whose tokens the proof's are compared, and the share of these that differs."""
        reference = reference_of(self.tried, self.proof)
        return reference.way, share_that_differs(self.proof.figures.tokens, reference.figures.tokens)

    def sentences(self) -> list[str]:
        """What a person reads of it."""
        row, seen, (reference, differing) = self.proof.row(self.problem), self.proof.figures, self.compared()
        held = f"{format_bytes(max(seen.peak_devices))} of {format_bytes(self.problem.machine.memory_limit)}"
        is_own, why = reference == self.way.name, "its weights are quantised" if self.way.load_in else "sums round"
        whose = "in its trial; no other way generated as many at once" if is_own else f"those of {reference}"
        said = f"{differing:.1%} of its tokens differ from {whose}, because {why}."
        return [
            f"{self.way.name} batch={self.proof.batch}: {row['new_tokens_per_second']:,.1f} new tokens/s after "
            f"{row['prompt_tokens_per_second']:,.1f} prompt tokens/s, {held}, loaded in {seen.load_seconds:.1f} s, "
            "proven in fresh processes.",
            f"That is {self.way.title}.",
            said if differing else f"Its tokens are the same as {whose}.",
            self._whose_weights(),
            SERVING,
        ]

    def _whose_weights(self) -> str:
        name = self.problem.workload.model.name
        loads = f"loads the weights of {self.model}" if self.model else f"names no weights, since {name} is a shape"
        return f'Its file {loads}; "model" in it can be any folder or Hub id of that shape.'


def generation_files(answer: GenerationAnswer, output: Path) -> dict[Path, str]:
    """The texts by absolute path: of `output`, and beside it of a script and its launcher."""
    paths = OutputPaths.beside(output)
    script = paths.config.with_name(f"{paths.config.name.removesuffix('.json')}.py")
    texts = to_json(_document(answer)), _script(answer, paths.config.name), _launch(answer, script.name)
    return dict(zip((paths.config, script, paths.launch), texts, strict=True))


def _document(answer: GenerationAnswer) -> dict[str, Any]:
    problem, machine, (reference, differing) = answer.problem, answer.problem.machine, answer.compared()
    return {
        "model": answer.model,
        "class": answer.proof.figures.model_class,
        "from_pretrained": from_pretrained(answer.way, problem),
        "deepspeed": deepspeed_of(answer.way, problem, machine.nvme_path) or None,
        "generate": {"max_new_tokens": problem.new_tokens, "do_sample": False, "use_cache": True},
        SECTION: {
            **answer.proof.row(problem),
            "prompt_len": problem.prompt_len,
            "new_tokens": problem.new_tokens,
            "processes": answer.processes,
            "device": machine.gpu_name or machine.device,
            "memory_limit_bytes": machine.memory_limit,
            "compared_with": reference,
            "tokens_that_differ": round(differing, 4),
            "tried": [each.row(problem) for each in answer.tried if not each.proof],
            "left_out": dict(answer.left_out),
            "versions": dict(problem.versions),
        },
    }


def _script(answer: GenerationAnswer, config: str) -> str:
    """About ten lines: what this way needs, and no more."""
    auto, way, several = answer.proof.figures.model_class, answer.way, answer.processes > 1
    on_gpu, before, after = answer.problem.machine.device == "cuda", [], []
    device = ('f"cuda:{local}"' if several else "model.device") if on_gpu else '"cpu"'
    imports = ["import json, os, sys", "from pathlib import Path"]
    if on_gpu and several:
        imports.append("import torch")
        before.append("torch.cuda.set_device(local)")
        before += ['answer["from_pretrained"]["device_map"] = {"": local}'] if way.spread == "whole" else []
    if way.rung is not None:
        imports += ["import deepspeed", "from transformers.integrations import HfDeepSpeedConfig"]
        before += ["deepspeed.init_distributed()", 'divides = HfDeepSpeedConfig(answer["deepspeed"])  # keep it']
        after.append('model = deepspeed.initialize(model=model, config=answer["deepspeed"])[0].module')
    synced = ", synced_gpus=True" if way.rung is not None else ""
    ends = "if rank == 0:\n    " if several and not way.own_prompts else ""
    lines = [
        '"""Generates as ladder measured it: every argument is a prompt."""',
        *imports,
        f"from transformers import {auto}, AutoTokenizer",
        f"answer = json.loads(Path(__file__).with_name({config!r}).read_text())",
        *([] if answer.model else [f"answer['model'] or sys.exit({_name_weights(config)!r})"]),
        'rank, local, ranks = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))',
        *before,
        f'model = {auto}.from_pretrained(answer["model"], **answer["from_pretrained"]).eval()',
        *after,
        'tokenizer = AutoTokenizer.from_pretrained(answer["model"], padding_side="left")',
        "tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token",
        'prompts = sys.argv[1:] or ["Hello"]',
        *(["prompts = prompts[rank::ranks] or prompts[:1]"] if way.own_prompts and several else []),
        f'batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to({device})',
        f'written = model.generate(**batch, **answer["generate"]{synced})',
        f'{ends}print(*tokenizer.batch_decode(written, skip_special_tokens=True), sep="\\n")',
    ]
    return "\n".join(lines) + "\n"


def _name_weights(config: str) -> str:
    return f"{config} names no weights; give a folder or Hub id as its model."


def _launch(answer: GenerationAnswer, script: str) -> str:
    machine, start = answer.problem.machine, shlex.quote(ranks_python())
    if answer.processes > 1:
        start += f" -m torch.distributed.run --nproc_per_node {answer.processes}"
    environment = {"OMP_NUM_THREADS": str(machine.host_threads), "DS_ACCELERATOR": machine.device}
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", **environment_of_a_cpu_rank(os.environ)}
    environment |= machine.allocator if machine.device == "cuda" else on_cpu
    lines = [
        "#!/usr/bin/env bash",
        *(
            f"# {line}"
            for line in (f"Written by ladder for {answer.problem.workload.model.name!r}.", *answer.sentences()[:3])
        ),
        f"#   bash {script.removesuffix('.py')}.launch.sh 'a prompt' 'another one'",
        "set -euo pipefail",
        'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)',
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        f'exec {start} "$here"/{shlex.quote(script)} "$@"',
    ]
    return "\n".join(lines) + "\n"
