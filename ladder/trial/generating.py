"""Generating in a rank: the model is loaded as the user's script will load it, and writes on from random prompts."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations import HfDeepSpeedConfig

from ladder.events.protocol import GeneratedEvent, GenerationSpec, TrialSpec
from ladder.trial.failure import OverLimitError
from ladder.trial.gauge import Gauge
from ladder.trial.model import DTYPES, build_model
from ladder.trial.model_class import auto_class, model_config
from ladder.trial.preload import unhide
from ladder.trial.reporter import Reporter, now
from ladder.trial.subject import most_of_ranks

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
    reporter.phase("model")
    if generation.load is None:
        build_model(spec, DTYPES[spec.dtype], "cpu").save_pretrained(generation.weights)
        return
    gauge.start(spec.memory_limit)
    began = now()
    writer = _Writer(spec, generation, generation.load, reporter)
    (load_seconds,) = most_of_ranks([now() - began], spec.device)
    speed = 0.0
    for candidate in spec.candidates:
        reporter.candidate = candidate.key
        event = _measured(writer, candidate.micro_batch, load_seconds, gauge)
        reporter.send(event)
        seconds = event.prompt_seconds + event.new_seconds  # the same on all ranks, so all end together
        before, speed = speed, candidate.micro_batch / seconds
        if not generation.every_batch and (seconds > _LONG or speed < _PAYS * before):
            break
    reporter.phase("teardown")


def _measured(writer: _Writer, batch: int, load_seconds: float, gauge: Gauge) -> GeneratedEvent:
    reporter = writer.reporter
    reporter.phase("warmup")
    gauge.reset()
    prompts, own = writer.prompts_of(batch)
    writer.write(prompts, 2)  # kernels are made ready, and buffers
    if gauge.settle():
        gauge.reset()  # memory reserved under the old, higher limit must not count
    reporter.phase("measure")
    rounds: list[list[float]] = []
    while len(rounds) < _ROUNDS and sum(map(sum, rounds)) < _SECONDS:
        tokens, *seconds = writer.write(prompts, writer.new_tokens)
        rounds.append(most_of_ranks(seconds, writer.device))
    prompt_seconds, new_seconds = min(rounds, key=sum)
    reading = gauge.read()
    return GeneratedEvent(
        t=now(),
        candidate=reporter.candidate or "",
        load_seconds=load_seconds,
        prompt_seconds=prompt_seconds,
        new_seconds=new_seconds,
        peak_devices=[reading.device, *map(torch.cuda.max_memory_reserved, writer.other_devices)],
        peak_host=reading.peak_host,
        tokens=tokens[:own].tolist(),
        model_class=writer.model_class,
    )


class _Times:
    """A streamer that notes when the prompt and each new token are there, and reports the latter as progress."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter, self.at = reporter, list[float]()

    def put(self, tokens: torch.Tensor) -> None:
        """They are on the host, so the device has computed them."""
        self.at.append(time.perf_counter())
        if len(self.at) > 1:
            self._reporter.step(self.at[-1] - self.at[-2])

    def end(self) -> None:
        """Nothing is left to do."""


class _Writer:
    """A loaded model that writes on from prompts, by greedy decoding."""

    def __init__(
        self, spec: TrialSpec, generation: GenerationSpec, arguments: dict[str, Any], reporter: Reporter
    ) -> None:
        self._spec, self._generation, self.reporter = spec, generation, reporter
        self.new_tokens, self.device = generation.new_tokens, spec.device
        # Of a rank that is alone; the gauge limits its first GPU only.
        self.other_devices = range(1, torch.cuda.device_count() if spec.device == "cuda" else 0)
        for device in self.other_devices:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, spec.memory_limit / total), device)
        if "quantization_config" in arguments:
            unhide("bitsandbytes")
        auto = auto_class(model_config(spec.model_config_json), spec.task)
        self.model_class = auto.__name__
        # While this object exists, transformers divides what it loads, as in the Trainer.
        self._divides = HfDeepSpeedConfig(spec.deepspeed) if spec.zero_stage == 3 else None
        self._model = auto.from_pretrained(
            generation.weights, local_files_only=True, use_safetensors=True, trust_remote_code=False, **arguments
        ).eval()
        if spec.device == "cuda" and {"cpu", "disk"} & set(
            map(str, getattr(self._model, "hf_device_map", {}).values())
        ):
            raise OverLimitError("the layers do not fit on the GPUs, and some would be kept on the host")
        if self._divides is not None:
            import deepspeed

            self._model = deepspeed.initialize(model=self._model, config=spec.deepspeed)[0].module

    def prompts_of(self, batch: int) -> tuple[torch.Tensor, int]:
        """This rank's of `batch` prompts, each of which is the same in every batch; and how many no other rank has.

        No rank is without one: all ranks of stage 3 compute together.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size() if self._generation.own_prompts else 1
        count = -(-batch // ranks)
        first = count * rank
        words = self._model.config.get_text_config().vocab_size
        seeds = [torch.Generator().manual_seed((first + place) % batch) for place in range(count)]
        length = (self._generation.prompt_len,)
        rows = [torch.randint(_FIRST_WORD, words, length, generator=seed) for seed in seeds]
        return torch.stack(rows).to(self._spec.device), max(0, min(count, batch - first))

    def write(self, ids: torch.Tensor, new_tokens: int) -> tuple[Any, float, float]:
        """The new tokens, and the seconds until the first one and from there on."""
        times = _Times(self.reporter)
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
                streamer=times,
            )
        return made[:, -new_tokens:], times.at[1] - times.at[0], times.at[-1] - times.at[1]
