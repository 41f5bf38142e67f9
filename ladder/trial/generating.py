"""Generating in a rank: the model is loaded as the user's script will load it, and writes on from random prompts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import BitsAndBytesConfig, StoppingCriteria, StoppingCriteriaList
from transformers.integrations import HfDeepSpeedConfig

from ladder.events.protocol import GeneratedEvent, GenerationSpec, TrialSpec
from ladder.events.step_policy import CandidateSpec
from ladder.trial.failure import OverLimitError
from ladder.trial.gauge import Gauge
from ladder.trial.model import DTYPES, build_model
from ladder.trial.model_class import auto_class, model_config
from ladder.trial.preload import unhide
from ladder.trial.reporter import Reporter, now
from ladder.trial.subject import synchronize

_ROUNDS, _SECONDS = 3, 2.0
"""A batch is generated so often, or for so long in all. Chosen: a single short round may be disturbed."""
_PAYS = 1.02
"""A larger batch follows as long as the last one was faster by so much. Chosen: the tolerance of a tune of training."""
_LONG = 60.0
"""Seconds of a round after which no larger batch follows. Chosen: it would take up to twice as long."""
_FIRST_WORD = 4
"""Prompts have no smaller token. Chosen: those are often what begins, ends and pads a text (as in `make_batch`)."""


def generate_all(spec: TrialSpec, generation: GenerationSpec, reporter: Reporter, gauge: Gauge) -> None:
    """Report what each batch takes, the smallest first; the one that fails raises what ended it."""
    if generation.load is None:
        _write_weights(spec, generation.weights, reporter)
        return
    gauge.start(spec.memory_limit)
    reporter.phase("model")
    began = now()
    writer = _Writer(spec, generation, reporter)
    (load_seconds,) = writer.slowest([now() - began])
    speed = 0.0
    for candidate in spec.candidates:
        reporter.candidate = candidate.key
        event = _measured(writer, candidate, load_seconds, gauge)
        reporter.send(event)
        seconds = event.prompt_seconds + event.new_seconds  # the same on all ranks, so all end together
        before, speed = speed, candidate.micro_batch / seconds
        if not generation.every_batch and (seconds > _LONG or speed < _PAYS * before):
            break
    reporter.phase("teardown")


def _write_weights(spec: TrialSpec, folder: str, reporter: Reporter) -> None:
    """Once for all ways, so that each has the same weights and loads them as it will load real ones."""
    reporter.phase("model")
    model = build_model(spec, DTYPES[spec.dtype], "cpu")
    with reporter.during("writing random weights"):
        model.save_pretrained(folder)


def _measured(writer: _Writer, candidate: CandidateSpec, load_seconds: float, gauge: Gauge) -> GeneratedEvent:
    writer.reporter.phase("warmup")
    gauge.reset()
    prompts = writer.prompts_of(candidate.micro_batch)
    writer.write(prompts.ids, 2)  # kernels are made ready, and buffers
    if gauge.settle():
        gauge.reset()  # memory reserved under the old, higher limit must not count
    writer.reporter.phase("measure")
    rounds: list[tuple[float, float]] = []
    while len(rounds) < _ROUNDS and sum(map(sum, rounds)) < _SECONDS:
        tokens, of_prompt, of_new = writer.write(prompts.ids, writer.new_tokens)
        first, rest = writer.slowest([of_prompt, of_new])
        rounds.append((first, rest))
    prompt_seconds, new_seconds = min(rounds, key=sum)
    reading = gauge.read()
    return GeneratedEvent(
        t=now(),
        candidate=candidate.key,
        load_seconds=load_seconds,
        prompt_seconds=prompt_seconds,
        new_seconds=new_seconds,
        peak_devices=[reading.device, *writer.other_devices()],
        peak_host=reading.peak_host,
        tokens=tokens[: prompts.own].tolist(),
        model_class=writer.model_class,
    )


@dataclass(frozen=True)
class _Prompts:
    ids: torch.Tensor
    own: int
    """Of them, those that no other rank has."""


class _Times(StoppingCriteria):  # type: ignore[misc]
    """Notes when each new token is there, and reports it as progress; stops nothing."""

    def __init__(self, device: str, reporter: Reporter) -> None:
        self._device, self._reporter, self.at = device, reporter, [time.perf_counter()]

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        synchronize(self._device)
        self.at.append(time.perf_counter())
        self._reporter.step(self.at[-1] - self.at[-2])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _Writer:
    """A loaded model that writes on from prompts, by greedy decoding."""

    def __init__(self, spec: TrialSpec, generation: GenerationSpec, reporter: Reporter) -> None:
        self._spec, self._generation, self.reporter = spec, generation, reporter
        self.new_tokens = generation.new_tokens
        self._rank = dist.get_rank()
        _limit_others(spec)
        auto = auto_class(model_config(spec.model_config_json), spec.task)
        self.model_class = auto.__name__
        self._model = self._loaded(auto, dict(generation.load or {}))
        self._model.eval()
        places = {str(place) for place in getattr(self._model, "hf_device_map", {}).values()}
        if spec.device == "cuda" and places & {"cpu", "disk"}:
            raise OverLimitError("the layers do not fit on the GPUs, and some would be kept on the host")

    def _loaded(self, auto: Any, arguments: dict[str, Any]) -> Any:
        spec, generation = self._spec, self._generation
        if generation.quantise is not None:
            unhide("bitsandbytes")
            arguments["quantization_config"] = BitsAndBytesConfig(**generation.quantise)
        # While this object exists, transformers divides what it loads, as in the Trainer.
        self._divides = HfDeepSpeedConfig(spec.deepspeed) if spec.zero_stage == 3 else None
        model = auto.from_pretrained(generation.weights, local_files_only=True, **arguments)
        if self._divides is None:
            return model
        import deepspeed

        return deepspeed.initialize(model=model, config=spec.deepspeed)[0].module

    def prompts_of(self, batch: int) -> _Prompts:
        """This rank's of `batch` prompts, each of which is the same in every batch. None is without one: all ranks of
        stage 3 compute together."""
        ranks = dist.get_world_size() if self._generation.own_prompts else 1
        count = -(-batch // ranks)
        first = count * self._rank if self._generation.own_prompts else 0
        own = max(0, min(count, batch - first))
        if not self._generation.own_prompts and self._rank > 0:
            own = 0
        words = self._model.config.get_text_config().vocab_size
        rows = [self._prompt((first + place) % batch, words) for place in range(count)]
        return _Prompts(torch.stack(rows).to(self._spec.device), own)

    def _prompt(self, number: int, words: int) -> torch.Tensor:
        seed = torch.Generator().manual_seed(1000 * self._spec.seed + number)
        return torch.randint(_FIRST_WORD, words, (self._generation.prompt_len,), generator=seed)

    def write(self, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, float, float]:
        """The new tokens, and the seconds until the first one and from there on."""
        synchronize(self._spec.device)
        times = _Times(self._spec.device, self.reporter)
        with self.reporter.during("generation"):
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                use_cache=True,  # the configuration of a training may say otherwise
                pad_token_id=0,
                synced_gpus=self._divides is not None,
                stopping_criteria=StoppingCriteriaList([times]),
            )
        return made[:, -new_tokens:], times.at[1] - times.at[0], times.at[-1] - times.at[1]

    def slowest(self, seconds: list[float]) -> list[float]:
        times = torch.tensor(seconds, device=self._spec.device, dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return [float(each) for each in times]

    def other_devices(self) -> list[int]:
        """The most that torch reserved on the further GPUs of a rank that lays layers over several."""
        others = range(1, torch.cuda.device_count()) if self._spec.device == "cuda" else ()
        return [torch.cuda.max_memory_reserved(device) for device in others]


def _limit_others(spec: TrialSpec) -> None:
    """The gauge limits a rank's first GPU only."""
    for device in range(1, torch.cuda.device_count()) if spec.device == "cuda" else ():
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, spec.memory_limit / total), device)
