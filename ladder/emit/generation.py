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
    """The proven way, and all that its files say of it."""

    problem: Generation
    proof: Tried
    model: str
    """What `from_pretrained` reads: a folder or a Hub id."""
    tried: Sequence[Tried]
    left_out: Mapping[str, str]

    @property
    def way(self) -> Way:
        return WAYS_BY_NAME[self.proof.way]

    @property
    def reference(self) -> Tried:
        """The proof's tokens are compared with its."""
        return reference_of(self.tried, self.proof)

    @property
    def differing(self) -> float:
        """Share of the proof's tokens that are others than the reference's."""
        return share_that_differs(self.proof.figures.tokens, self.reference.figures.tokens)

    @property
    def processes(self) -> int:
        return self.way.processes(self.problem.machine.world_size)

    def sentences(self) -> list[str]:
        """What a person reads of it."""
        row, seen = self.proof.row(self.problem), self.proof.figures
        return [
            f"{self.way.name} batch={self.proof.batch}: {row['new_tokens_per_second']:,.1f} new tokens/s after "
            f"{row['prompt_tokens_per_second']:,.1f} prompt tokens/s, {format_bytes(max(seen.peak_devices))} of "
            f"{format_bytes(self.problem.machine.memory_limit)}, loaded in {seen.load_seconds:.1f} s, proven in fresh "
            "processes.",
            f"That is {self.way.title}.",
            self._compared(),
            SERVING,
        ]

    def _compared(self) -> str:
        is_exact, is_own = self.way.load_in is None, self.reference.way == self.way.name
        if is_own and not is_exact:
            return "No way with unchanged weights fits, so it is not known which tokens quantising changed."
        whose = "in its trial; no other way generated as many at once" if is_own else f"those of {self.reference.way}"
        if not self.differing:
            return f"Its tokens are the same as {whose}."
        why = "it adds in another order" if is_exact else "its weights are quantised"
        return f"{self.differing:.1%} of its tokens are not the same as {whose}, because {why}."


def generation_files(answer: GenerationAnswer, output: Path) -> dict[Path, str]:
    """The texts by absolute path: of `output`, and beside it of a script and its launcher."""
    paths = OutputPaths.beside(output)
    script = paths.config.with_name(f"{paths.config.name.removesuffix('.json')}.py")
    return {
        paths.config: to_json(_document(answer)),
        script: _script(answer, paths.config.name),
        paths.launch: _launch(answer, script.name),
    }


def _document(answer: GenerationAnswer) -> dict[str, Any]:
    problem, row, machine = answer.problem, answer.proof.row(answer.problem), answer.problem.machine
    return {
        "model": answer.model,
        "class": answer.proof.figures.model_class,
        "from_pretrained": from_pretrained(answer.way, problem),
        "deepspeed": deepspeed_of(answer.way, problem, machine.nvme_path) or None,
        "generate": {"max_new_tokens": problem.new_tokens, "do_sample": False, "use_cache": True},
        SECTION: {
            **{name: value for name, value in row.items() if name not in ("outcome", "why")},
            "prompt_len": problem.prompt_len,
            "new_tokens": problem.new_tokens,
            "processes": answer.processes,
            "device": machine.gpu_name or machine.device,
            "memory_limit_bytes": machine.memory_limit,
            "compared_with": answer.reference.way,
            "tokens_that_differ": round(answer.differing, 4),
            "tried": [each.row(problem) for each in answer.tried if not each.proof],
            "left_out": dict(answer.left_out),
            "versions": dict(problem.versions),
        },
    }


def _script(answer: GenerationAnswer, config: str) -> str:
    """About ten lines: what this way needs, and no more."""
    auto, way, on_gpu = answer.proof.figures.model_class, answer.way, answer.problem.machine.device == "cuda"
    is_divided, several = way.rung is not None, answer.processes > 1
    before, after, device = [], [], "model.device" if on_gpu else '"cpu"'
    if on_gpu and several:
        before.append("torch.cuda.set_device(local)")
        device = 'f"cuda:{local}"'
        if way.spread == "whole":
            before.append('answer["from_pretrained"]["device_map"] = {"": local}')
    if is_divided:
        before += ["deepspeed.init_distributed()", 'divides = HfDeepSpeedConfig(answer["deepspeed"])  # keep it']
        after.append('model = deepspeed.initialize(model=model, config=answer["deepspeed"])[0].module')
    part = " if not ranks else prompts[rank::ranks] or prompts[:1]" if way.own_prompts else ""
    modules = (["deepspeed"] if is_divided else []) + (["torch"] if on_gpu and several else [])
    lines = [
        '"""Generates as ladder measured it: every argument is a prompt."""',
        "import json, os, sys",
        "from pathlib import Path",
        *(f"import {module}" for module in modules),
        f"from transformers import {auto}, AutoTokenizer",
        *(["from transformers.integrations import HfDeepSpeedConfig"] if is_divided else []),
        "",
        f'answer = json.loads(Path(__file__).with_name("{config}").read_text())',
        'rank, local, ranks = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))',
        *before,
        f'model = {auto}.from_pretrained(answer["model"], **answer["from_pretrained"]).eval()',
        *after,
        'tokenizer = AutoTokenizer.from_pretrained(answer["model"], padding_side="left")',
        "tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token",
        'prompts = sys.argv[1:] or ["Hello"]',
        f'batch = tokenizer(prompts{part}, return_tensors="pt", padding=True).to({device})',
        'batch.pop("token_type_ids", None)',
        f'written = model.generate(**batch, **answer["generate"]{", synced_gpus=True" if is_divided else ""})',
        *(["if rank == 0:"] if several and not way.own_prompts else []),
        f'{"    " if several and not way.own_prompts else ""}print(*tokenizer.batch_decode(written), sep="\\n")',
    ]
    return "\n".join(lines) + "\n"


def _launch(answer: GenerationAnswer, script: str) -> str:
    machine, start = answer.problem.machine, shlex.quote(ranks_python())
    if answer.processes > 1:
        start += f" -m torch.distributed.run --nproc_per_node {answer.processes}"
    environment = {"OMP_NUM_THREADS": str(machine.host_threads), "DS_ACCELERATOR": machine.device}
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", **environment_of_a_cpu_rank(os.environ)}
    environment |= machine.allocator if machine.device == "cuda" else on_cpu
    said = [f"Written by ladder for {answer.model!r}.", *answer.sentences()[:3]]
    lines = [
        "#!/usr/bin/env bash",
        *(f"# {line}" for line in said),
        f"#   bash {script.removesuffix('.py')}.launch.sh 'a prompt' 'another one'",
        "set -euo pipefail",
        'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)',
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        f'exec {start} "$here"/{shlex.quote(script)} "$@"',
    ]
    return "\n".join(lines) + "\n"
