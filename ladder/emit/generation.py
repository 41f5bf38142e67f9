"""best_generation.json, the script that uses it, and what launches that."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.emit.config import SECTION, to_json
from ladder.emit.files import OutputPaths
from ladder.generating.search import Tried
from ladder.generating.ways import Generation, Way
from ladder.machine.interpreter import ranks_python
from ladder.units import format_bytes

SERVING = (
    "For many requests at once, a serving engine such as vLLM or SGLang is many times faster; this answer is for a "
    "script of your own, and for a model that no other way holds."
)


@dataclass(frozen=True, kw_only=True)
class GenerationAnswer:
    """The proven way, and all that its files say of it."""

    problem: Generation
    way: Way
    proof: Tried
    model: str
    """What `from_pretrained` reads: a folder or a Hub id."""
    from_pretrained: Mapping[str, Any]
    quantisation: Mapping[str, Any] | None
    deepspeed: Mapping[str, Any] | None
    environment: Mapping[str, str]
    """Of the trials."""
    reference: str
    """The way whose tokens the proof's were compared with; its own where it was the only one."""
    differing: float
    """Share of its tokens that are others than the reference's."""
    tried: Sequence[Tried]
    left_out: Mapping[str, str]
    gpu_name: str | None
    versions: Mapping[str, str]

    def sentences(self) -> list[str]:
        """What a person reads of it."""
        problem, proof = self.problem, self.proof
        row = proof.row(problem.prompt_len, problem.new_tokens)
        assert proof.figures is not None
        most = format_bytes(max(proof.figures.devices))
        return [
            f"{proof.way} batch={proof.batch}: {row['new_tokens_per_second']:,.1f} new tokens/s after "
            f"{row['prompt_tokens_per_second']:,.1f} prompt tokens/s, {most} of {format_bytes(problem.memory_limit)}, "
            f"loaded in {proof.figures.load_seconds:.1f} s, proven in fresh processes.",
            f"That is {self.way.title}.",
            self._compared(),
            SERVING,
        ]

    def _compared(self) -> str:
        if self.reference == self.proof.way and not self.way.is_exact:
            return "No way with unchanged weights fits, so nobody can say which tokens quantising changed."
        other = self.reference != self.proof.way
        whose = f"those of {self.reference}" if other else "in its trial; no other way generated as many at once"
        if not self.differing:
            return f"Its tokens are the same as {whose}."
        why = ", because it adds in another order" if self.way.is_exact else ", because its weights are quantised"
        return f"{self.differing:.1%} of its tokens differ from {whose}{why}."


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
    problem, figures = answer.problem, answer.proof.figures
    assert figures is not None
    rows = [each.row(problem.prompt_len, problem.new_tokens) for each in answer.tried if not each.proof]
    row = answer.proof.row(problem.prompt_len, problem.new_tokens)
    return {
        "model": answer.model,
        "class": figures.model_class,
        "from_pretrained": dict(answer.from_pretrained),
        "quantization_config": dict(answer.quantisation) if answer.quantisation else None,
        "deepspeed": dict(answer.deepspeed) if answer.deepspeed else None,
        "generate": {"max_new_tokens": problem.new_tokens, "do_sample": False, "use_cache": True},
        SECTION: {
            **{name: value for name, value in row.items() if name not in ("outcome", "why")},
            "title": answer.way.title,
            "prompt_len": problem.prompt_len,
            "new_tokens": problem.new_tokens,
            "processes": answer.way.processes(problem.world_size),
            "devices": answer.way.devices(problem.world_size),
            "device": answer.gpu_name or problem.device,
            "memory_limit_bytes": problem.memory_limit,
            "compared_with": answer.reference,
            "tokens_that_differ": round(answer.differing, 4),
            "tried": rows,
            "left_out": dict(answer.left_out),
            "versions": dict(answer.versions),
        },
    }


def _script(answer: GenerationAnswer, config: str) -> str:
    """Ten lines or so: what this way needs, and no more."""
    assert answer.proof.figures is not None
    auto, processes = answer.proof.figures.model_class, answer.way.processes(answer.problem.world_size)
    on_gpu, arguments = answer.problem.device == "cuda", '**answer["from_pretrained"]'
    names, before, after = [auto, "AutoTokenizer"], [], []
    if answer.quantisation:
        names.append("BitsAndBytesConfig")
        arguments += ', quantization_config=BitsAndBytesConfig(**answer["quantization_config"])'
    if on_gpu and processes > 1:
        before.append('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))')
    if on_gpu and answer.way.spread == "whole" and processes > 1:
        before.append('answer["from_pretrained"]["device_map"] = {"": int(os.environ["LOCAL_RANK"])}')
    if answer.way.rung is not None:
        before += ["deepspeed.init_distributed()", 'divides = HfDeepSpeedConfig(answer["deepspeed"])  # keep it']
        after.append('model = deepspeed.initialize(model=model, config=answer["deepspeed"])[0].module')
    modules = ["deepspeed"] if answer.way.rung is not None else []
    modules += ["torch"] if any("torch." in line for line in before) else []
    device = "f\"cuda:{os.environ['LOCAL_RANK']}\"" if on_gpu and answer.way.rung is not None else "model.device"
    device = '"cpu"' if not on_gpu else device
    part = '[rank :: int(os.environ["WORLD_SIZE"])] or prompts[:1]' if answer.way.own_prompts else ""
    synced = ", synced_gpus=True" if answer.way.rung is not None else ""
    ends = "" if answer.way.own_prompts or processes == 1 else "if rank == 0:\n    "
    lines = [
        '"""Generates as ladder measured it: every argument is a prompt."""',
        "import json",
        "import os",
        "import sys",
        "from pathlib import Path",
        "",
        *(f"import {module}" for module in modules),
        f"from transformers import {', '.join(sorted(names))}",
        *(["from transformers.integrations import HfDeepSpeedConfig"] if answer.way.rung is not None else []),
        "",
        f"answer = json.loads(Path(__file__).with_name({json.dumps(config)}).read_text())",
        'rank, prompts = int(os.environ.get("RANK", 0)), sys.argv[1:] or ["Hello"]',
        *before,
        f'model = {auto}.from_pretrained(answer["model"], {arguments}).eval()',
        *after,
        'tokenizer = AutoTokenizer.from_pretrained(answer["model"], padding_side="left")',
        "tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token",
        'options = {"return_tensors": "pt", "padding": True, "return_token_type_ids": False}',
        f"batch = tokenizer(prompts{part}, **options).to({device})",
        f'written = model.generate(**batch, **answer["generate"]{synced})',
        f'{ends}print(*tokenizer.batch_decode(written, skip_special_tokens=True), sep="\\n")',
    ]
    return "\n".join(lines) + "\n"


def _launch(answer: GenerationAnswer, script: str) -> str:
    processes = answer.way.processes(answer.problem.world_size)
    python = shlex.quote(ranks_python())
    start = python if processes == 1 else f"{python} -m torch.distributed.run --nproc_per_node {processes}"
    said = [line for text in answer.sentences()[:3] for line in text.splitlines()]
    lines = [
        "#!/usr/bin/env bash",
        f"# Written by ladder for {shlex.quote(answer.model)}.",
        *(f"# {line}" for line in said),
        f"#   bash {shlex.quote(script.removesuffix('.py'))}.launch.sh 'a prompt' 'another one'",
        "set -euo pipefail",
        'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)',
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(answer.environment.items())),
        f'exec {start} "$here"/{shlex.quote(script)} "$@"',
    ]
    return "\n".join(lines) + "\n"
