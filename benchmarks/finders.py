"""One rank of a training whose micro-batch a finder chooses: the Trainer's, accelerate's or Lightning's.

    [torchrun --nproc_per_node 2] benchmarks/finders.py SPEC.json

`side_by_side.py` writes SPEC.json and starts this; its `method` is one of

- `auto_find_batch_size`: the Trainer with that argument. It leaves the accumulation as it is, so the Trainer is started
  twice, as a person would: to find, then, with the size found and the accumulation for the whole batch, to train;
- `find_executable_batch_size`: accelerate's decorator round a plain loop of accelerate, which sets the accumulation
  anew at each attempt;
- `lightning`: `Tuner.scale_batch_size` of Lightning by powers of two from 1, then a fit with the size found. It looks
  for a size with an accumulation of 2, so that gradients are held during a forward pass, as they are in the training.

The first two begin at the whole batch of a rank. A size has been found when the third optimizer step with it is done.
Then come as many steps as SPEC.json asks for, for real. Rank 0 appends a line to the file that SPEC.json names when
the size is found (`micro_batch`, `seconds` since the process was started, `failures`: attempts that ran out of memory),
and another after the training. Exit code 3 says that memory ran out for good, 4 that the finder does not run here; a
line of the output then says why. A size that does not divide the batch trains with the nearest batch that it does.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from agreed import CANNOT, CANNOT_RUN, OUT_OF_MEMORY, PROVEN
from by_hand import Timed, trainer_of
from one_rank import (
    CLIP,
    Clock,
    adam,
    age,
    append,
    begin,
    forget_peaks,
    is_out_of_memory,
    join,
    limit_memory,
    make_model,
    read_spec,
    world_size,
)


class CannotRunError(Exception):
    """The finder does not run here; the message says why."""


def main() -> None:
    spec = read_spec(sys.argv[1])
    if spec["method"] == "lightning" and importlib.util.find_spec("lightning"):
        importlib.import_module("lightning.pytorch")  # before a CPU's memory is limited
    device = begin(spec)
    if world_size() > 1:
        join(device)
    try:
        FINDERS[spec["method"]](spec, device)
    except CannotRunError as error:
        print(f"{CANNOT}{error}", flush=True)
        os._exit(CANNOT_RUN)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) and "reached zero" not in str(error):
            raise
        print(error, flush=True)
        os._exit(OUT_OF_MEMORY)


def limited_model(spec: dict[str, Any], device: torch.device) -> Any:
    """The model on the device, where memory is then limited."""
    model = make_model(spec, device)
    limit_memory(spec["cap_gib"], device)
    return model


def accumulation_of(spec: dict[str, Any], size: int) -> int:
    """Micro-batches of `size` for the batch that is nearest to the one wanted."""
    return max(1, round(spec["batch"] / (size * world_size())))


def found(spec: dict[str, Any], size: int, failures: int) -> None:
    """The line that says when the size was found."""
    append(spec, {"micro_batch": size, "seconds": round(age(), 2), "failures": failures})


class Attempts(transformers.TrainerCallback):
    """Counts trainings that began and that ended, and holds each to the limit of memory."""

    def __init__(self, spec: dict[str, Any], device: torch.device) -> None:
        self._spec, self._device, self.failures = spec, device, -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.failures += 1
        forget_peaks(self._device)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        limit_memory(self._spec["cap_gib"], self._device)
        control.should_training_stop = state.global_step >= PROVEN


def by_the_trainer(spec: dict[str, Any], device: torch.device) -> None:
    """`auto_find_batch_size`, in the training too: it may have to shrink once more."""
    model, whole, attempts = limited_model(spec, device), spec["batch"] // world_size(), Attempts(spec, device)
    trainer = trainer_of(spec, model, whole, 1, attempts, auto_find_batch_size=True)
    trainer.train()
    size = int(trainer.state.train_batch_size)
    found(spec, size, attempts.failures)
    trainer.optimizer = None  # its states would stay on the GPU
    trainer.accelerator.free_memory()
    clocks: list[Clock] = []

    class Anew(Timed):
        """A new clock for each attempt."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clocks.append(Clock(spec, device))
            self._clock = clocks[-1]
            forget_peaks(device)

    accumulation = accumulation_of(spec, size)
    trainer = trainer_of(spec, model, size, accumulation, Anew(Clock(spec, device)), auto_find_batch_size=True)
    trainer.train()
    append(spec, clocks[-1].row(int(trainer.state.train_batch_size), accumulation))


def by_accelerate(spec: dict[str, Any], device: torch.device) -> None:
    """`find_executable_batch_size` as its documentation has it: everything is made anew inside the function."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    attempts: list[int] = []

    def train(batch_size: int) -> None:
        attempts.append(batch_size)
        accumulation = accumulation_of(spec, batch_size)
        accelerator = Accelerator(
            mixed_precision="bf16", gradient_accumulation_steps=accumulation, cpu=device.type == "cpu"
        )
        accelerator.free_memory()
        model = limited_model(spec, device)
        wrapped, optimizer = accelerator.prepare(model, adam(model))
        forget_peaks(device)
        ids = torch.randint(4, model.config.vocab_size, (batch_size, spec["seq_len"]), device=device)

        def step() -> None:
            for _ in range(accumulation):
                with accelerator.accumulate(wrapped):
                    accelerator.backward(wrapped(input_ids=ids, labels=ids).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()

        timed(spec, device, step, lambda: found(spec, batch_size, len(attempts) - 1), batch_size, accumulation)

    find_executable_batch_size(train, starting_batch_size=spec["batch"] // world_size())()


def timed(
    spec: dict[str, Any],
    device: torch.device,
    step: Callable[[], None],
    when_proven: Callable[[], None],
    size: int,
    accumulation: int,
) -> None:
    """Steps until the clock says that it is enough; `when_proven` is called once, after the first few."""
    clock = Clock(spec, device)
    for number in range(1, sys.maxsize):
        step()
        if number == PROVEN:
            when_proven()
        if clock.done() and number >= PROVEN:
            break
    append(spec, clock.row(size, accumulation))


def by_lightning(spec: dict[str, Any], device: torch.device) -> None:
    """`Tuner.scale_batch_size`, then `fit`."""
    if importlib.util.find_spec("lightning") is None:
        raise CannotRunError("Lightning is not installed.")
    lightning: Any = importlib.import_module("lightning.pytorch")
    tuner: Any = importlib.import_module("lightning.pytorch.tuner")
    whole = spec["batch"] // world_size()
    module = lightning_module(lightning, spec, limited_model(spec, device), device)
    try:
        # It takes its highest size without a trial, so that is set to the first power of two beyond the batch.
        most = 2 ** whole.bit_length()
        tuner.Tuner(trainer_of_lightning(lightning, spec, device, 2, spec.get("steps", 0))).scale_batch_size(
            module, mode="power", init_val=1, steps_per_trial=PROVEN, max_val=most
        )
    except ValueError as error:
        raise CannotRunError(str(error)) from None
    size = min(module.batch_size, whole)
    found(spec, size, module.begun - module.ended)
    module.batch_size, module.clock = size, Clock(spec, device)
    accumulation = accumulation_of(spec, size)
    trainer_of_lightning(lightning, spec, device, accumulation, spec["steps"] + 2).fit(module)
    append(spec, module.clock.row(size, accumulation))


def trainer_of_lightning(
    lightning: Any, spec: dict[str, Any], device: torch.device, accumulation: int, steps: int
) -> Any:
    """Lightning's Trainer, without loggers, checkpoints and bars."""
    return lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=world_size(),
        strategy="ddp" if world_size() > 1 else "auto",
        precision="bf16-mixed",
        max_steps=steps,
        accumulate_grad_batches=accumulation,
        default_root_dir=spec["folder"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def lightning_module(lightning: Any, spec: dict[str, Any], model: Any, device: torch.device) -> Any:
    """The model as Lightning wants it, which counts attempts and, once it has a clock, times optimizer steps."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size, self.begun, self.ended = model, 1, 0, 0
            self.clock: Clock | None = None
            self._seen = 0

        def configure_optimizers(self) -> Any:
            return adam(self.model)

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            # Lightning's own clipping refuses a fused optimizer.
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)

        def train_dataloader(self) -> Any:
            one = torch.randint(4, model.config.vocab_size, (spec["seq_len"],))
            data = [{"input_ids": one, "labels": one}] * (8 * spec["batch"] * (spec["steps"] + 2))
            return torch.utils.data.DataLoader(data, batch_size=self.batch_size)  # type: ignore[arg-type]

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def on_train_start(self) -> None:
            self.begun += 1
            forget_peaks(device)
            self._seen = 0

        def on_train_end(self) -> None:
            self.ended += 1

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == self._seen:
                return  # it only accumulated
            self._seen = self.global_step
            if self.clock is None:
                limit_memory(spec["cap_gib"], device)
            elif self.clock.done():
                self.trainer.should_stop = True

    return Module()


FINDERS: dict[str, Callable[[dict[str, Any], torch.device], None]] = {
    "auto_find_batch_size": by_the_trainer,
    "find_executable_batch_size": by_accelerate,
    "lightning": by_lightning,
}


if __name__ == "__main__":
    main()
