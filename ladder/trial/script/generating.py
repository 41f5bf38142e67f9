"""Trainers that write what they train on: TRL's GRPO and RLOO, with transformers' own generation.

One generation serves several micro-steps, `steps_per_generation` times `num_iterations` of them. How many completions
it makes is the script's and the same for every candidate; the micro-batch decides into how many parts they are cut.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from ladder.events.step_policy import CandidateSpec
from ladder.trial.reporter import now
from ladder.trial.script.hold import Grip, NotTakenHoldOfError
from ladder.trial.script.real_steps import RealSteps
from ladder.trial.script.samples import Samples
from ladder.trial.script.trainer_proof import RealStepsOfTrainer, evaluate
from ladder.trial.script.trainer_steps import TrainerSubject
from ladder.trial.subject import Kind, most_of_ranks, synchronize
from ladder.workload.script import Generation

SETTINGS = (
    "generation_batch_size",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
    "max_completion_length",
)
_BATCHES_OF_EVALUATION = 2
"""Of a rank. Chosen: the first has the longest prompts, and writing takes long."""
_GENERATING_SECONDS = 1.0
"""Usual generations are timed for so long in all, without the first one, in which kernels are made ready for each new
length (measured on an H200: 10 s, where a training of the same script later makes a whole step in 2 s). Chosen: a
single one, if it is as short as this, may be disturbed."""
_SIGN_SECONDS = 10.0
"""Between two signs of progress in a generation. Chosen: far less than a rank may be silent in a step."""


def looking(arguments: Any) -> dict[str, Any]:
    """For a look: its one process has whole groups of completions, as the ranks of the training together have."""
    if not hasattr(arguments, "generation_batch_size"):
        return {}
    return {"generation_batch_size": None, "steps_per_generation": getattr(arguments, "num_generations", None)}


def refuse_servers(arguments: Any, grip: Grip) -> None:
    """End a look before its trainer would start vLLM."""
    if getattr(arguments, "use_vllm", False):
        grip.leave(
            NotTakenHoldOfError("it generates with vLLM, which trials cannot do yet; tune it with use_vllm=False")
        )


def generates(trainer: Any) -> bool:
    return hasattr(trainer.args, "generation_batch_size")


def require_known_way(trainer: Any) -> None:
    """NotTakenHoldOfError for a trainer that makes its completions in another way than TRL's GRPO does."""
    if not generates(trainer):
        return
    needed = ("_buffered_inputs", "_generate_and_score_completions", "generation_config", "num_generations")
    others = ("use_transformers_continuous_batching", "rollout_func", "tools", "environment_factories")
    if not all(hasattr(trainer, name) for name in needed) or any(getattr(trainer, name, None) for name in others):
        raise NotTakenHoldOfError(
            f"its {type(trainer).__name__} generates what it trains on in another way than by generate() of "
            "transformers, which trials cannot do yet; tune an SFT of the same model and lengths in its place"
        )


def facts_of(trainer: Any, own: dict[str, Any]) -> dict[str, Any]:
    """What a look reports of the samples, as arguments of ScriptFacts. A sample is a prompt with one completion."""
    samples = _prompts(trainer, trainer.get_train_dataloader())
    longest = int(own["max_completion_length"])
    generation = Generation(
        batch=own["generation_batch_size"],
        micro_steps=own["steps_per_generation"],
        per_prompt=int(own["num_generations"]),
        iterations=int(own["num_iterations"]),
        longest=longest,
    )
    return {
        "longest": max(samples.sizes.values()) + longest,
        "rows": 1,
        "mean_tokens": statistics.fmean(samples.sizes.values()) + longest,
        "num_samples": samples.total,
        "num_looked_at": len(samples.sizes),
        "sizes": samples.read_singly,
        "generation": generation,
    }


def _prompts(trainer: Any, loader: Any, known: Mapping[int, int] | None = None) -> Samples:
    return Samples(loader, _prompt_size(trainer), known)


def _prompt_size(trainer: Any) -> Callable[[Any], int]:
    """Says how many tokens the prompt of a sample has."""
    return lambda sample: len(trainer._tokenize_prompts([sample["prompt"]])[0][0])


def show_progress(trainer: Any, grip: Grip) -> None:
    """Let `trainer` say when it generates, and give signs of progress while it does: it may take minutes."""
    generate, last, is_generating = trainer._generate_and_score_completions, now(), False

    def named(*arguments: Any, **options: Any) -> Any:
        nonlocal is_generating
        is_generating = True
        with grip.reporter.during("generation"):
            made = generate(*arguments, **options)
        is_generating = False
        return made

    def signed(*_: Any) -> None:
        nonlocal last
        if is_generating and now() - last > _SIGN_SECONDS:
            last = now()
            grip.reporter.step(0.0)

    trainer._generate_and_score_completions = named
    trainer.model.register_forward_pre_hook(signed)


class GeneratingSubject(TrainerSubject):
    """Micro-steps of a trainer on completions that its own model wrote.

    It writes them once for the longest batches and once for the usual ones of each candidate. The usual time of a
    generation is added to the micro-steps that share it.
    """

    def __init__(self, trainer: Any, grip: Grip) -> None:
        super().__init__(trainer, grip)
        self.is_even = False  # alike prompts have completions of any length
        self._args: Any = trainer.args
        self._completions = self._args.generation_batch_size // grip.spec.world_size
        self._generate = trainer._prepare_inputs
        trainer._prepare_inputs = lambda part: part  # of a micro-step: it was written before
        self._parts: dict[Kind, Any] = {}

    def _look_at_samples(self) -> Samples:
        return _prompts(self._trainer, self._loader, self._grip.known_sizes)

    def use(self, candidate: CandidateSpec) -> None:
        super().use(candidate)
        self._parts.clear()
        self._args.per_device_train_batch_size = candidate.micro_batch
        self._args.gradient_accumulation_steps = candidate.accumulation
        self._args.steps_per_generation = self._completions // candidate.micro_batch

    def share_of_new_lengths(self, candidate: CandidateSpec) -> float:
        return 0.0  # the time of a new length is in that of its generation

    def draw(self, candidate: CandidateSpec, kind: Kind) -> tuple[Any, Any]:
        if kind not in self._parts:
            self._parts[kind] = cycle(self._written(kind))
        return dict(next(self._parts[kind])), None

    def _written(self, kind: Kind) -> list[Any]:
        """The parts of one generation. Every candidate gets the same random numbers."""
        trainer: Any = self._trainer
        settings, longest = trainer.generation_config, kind == "longest"
        fewest = settings.min_new_tokens
        trainer.model_wrapped.train()
        trainer._step, trainer._buffered_inputs = 0, None
        devices = [torch.cuda.current_device()] if self._grip.spec.device == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(dist.get_rank())
            if longest:  # no completion ends before it is as long as one may get
                settings.min_new_tokens = settings.max_new_tokens
            seconds = [self._timed(lambda: self._generate(self._samples.batch(self._completions, kind)))]
            settings.min_new_tokens = fewest
            while not longest and sum(seconds[1:]) < _GENERATING_SECONDS:
                seconds.append(self._timed(lambda: self._generate(self._samples.batch(self._completions, kind))))
        warm = statistics.median(seconds[1:] or seconds)
        self.shared_seconds = warm / (self._args.steps_per_generation * self._args.num_iterations)
        parts: list[Any] = trainer._buffered_inputs
        return parts

    def _timed(self, generate: Any) -> float:
        """Seconds of the slowest rank."""
        device = self._grip.spec.device
        synchronize(device)
        began = time.perf_counter()
        generate()
        synchronize(device)
        return most_of_ranks([time.perf_counter() - began], device)[0]


class RealStepsOfGenerating(RealStepsOfTrainer):
    """The proof: batches are known when they have been written."""

    def __init__(self, trainer: Any, grip: Grip) -> None:
        super().__init__(trainer, grip)
        prepare = trainer._prepare_inputs

        def noted(*arguments: Any, **options: Any) -> Any:
            inputs = prepare(*arguments, **options)
            if trainer.model.training:
                self._steps.note_batch(_whole(inputs))
            return inputs

        trainer._prepare_inputs = noted

    def _make_steps(self) -> RealSteps:
        args: Any = self._trainer.args
        accumulation = args.gradient_accumulation_steps
        shared = args.steps_per_generation * args.num_iterations
        return RealSteps(self._grip, None, cycle=math.lcm(shared, accumulation) // accumulation)

    def _note(self, batch: Any) -> None:
        """Nothing: the loader gives prompts."""

    def _evaluate(self) -> None:
        trainer: Any = self._trainer
        evaluate(trainer, _BATCHES_OF_EVALUATION, _prompt_size(trainer), trainer.num_generations_eval)


def _whole(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prompts with their completions, as one batch."""
    parts = {"input_ids": ("prompt_ids", "completion_ids"), "attention_mask": ("prompt_mask", "completion_mask")}
    return {name: torch.cat([inputs[each] for each in names], dim=1) for name, names in parts.items()}
