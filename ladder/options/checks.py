"""What cannot be asked: options that contradict each other, have no effect, or name nothing."""

from __future__ import annotations

from ladder.backends.base import Backend
from ladder.backends.registry import BACKENDS, RUNGS_BY_NAME, backend_of
from ladder.errors import UsageError
from ladder.options.generation import require_training
from ladder.options.technique_choices import require_known
from ladder.options.tune import ALL_BACKENDS, TuneOptions, WorkloadOptions, choices_in
from ladder.techniques.registry import TECHNIQUES
from ladder.text import shown


def require_text(options: TuneOptions) -> None:
    """UsageError for a path that is not valid UTF-8: paths are written to JSON files."""
    for value in (
        options.model,
        *options.script,
        options.run_dir,
        options.output,
        options.nvme_path,
        options.save_weights,
        options.hostfile,
    ):
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise UsageError(f"{shown(value)} is not valid UTF-8; rename it or choose another.") from None


def require_workload(options: WorkloadOptions) -> None:
    """UsageError unless there is either a model or a script, with what goes with it."""
    require_training(options)
    if options.model and options.script:
        raise UsageError(
            f"{shown(options.model)} and a script are both named; leave the model out: the script has its own."
        )
    if not options.model and not options.script:
        raise UsageError("Name a MODEL, or your own script behind --, such as: ladder tune -- train.py --epochs 1.")
    own: list[tuple[str, bool]] = []
    if options.script:
        own = [("--task", options.task is not None), ("--seq-len", options.seq_len is not None)]
        own += [("--lora", options.lora is not None), ("--lora-file", options.lora_file is not None)]
        own += [("--load-in", options.load_in is not None), ("--freeze", bool(options.freeze))]
        own.append(("--prepare-kbit", options.prepare_kbit))
        own.append(("--optimizer", options.optimizer != WorkloadOptions.optimizer))
        clipping = getattr(options, "gradient_clipping", TuneOptions.gradient_clipping)
        own.append(("--gradient-clipping", clipping != TuneOptions.gradient_clipping))
    for flag, is_given in own:
        if is_given:
            raise UsageError(f"{flag} has no effect on a script, which has its own model and data; leave it out.")
    if options.lora is not None and options.lora_file is not None:
        raise UsageError("--lora and --lora-file both say which adapters to train; give one of them.")
    if options.load_in is not None and options.dtype == "fp32":
        raise UsageError("--load-in computes in 16 bits, and --dtype fp32 does not; give one of them.")
    if options.map and not options.script:
        raise UsageError("--map is about the options of a script, and none is named; leave it out.")


def _require_usual_optimizer(options: TuneOptions) -> None:
    """UsageError if --with-optimizer cannot write what is trained with."""
    if options.with_optimizer is None:
        return
    if options.script:
        raise UsageError("--with-optimizer has no effect on a script, which keeps its own optimizer; leave it out.")
    for name in options.allow:
        if TECHNIQUES[name].optimizer(options.optimizer):
            raise UsageError(
                f"--with-optimizer writes {options.optimizer}, and --allow {name} needs an optimizer that only a "
                "script can make; give one of them."
            )


def require_effective_options(options: TuneOptions) -> None:
    """UsageError for options that would have no effect with the others: nothing is silently ignored."""
    from ladder.search.policy import ALONG_THE_LADDER  # imported here because it would double the time for `--help`

    if options.tolerance != TuneOptions.tolerance and options.strategy != "auto":
        raise UsageError(
            f"--tolerance has no effect with --strategy {options.strategy}, which rules out no candidate by "
            "prediction; leave it out, or use --strategy auto."
        )
    require_known(options.allow)
    _require_usual_optimizer(options)
    beyond = choices_in(options).options
    beyond += [f"--rung {name}" for name in options.rungs if not RUNGS_BY_NAME[name].documented]
    if not any(rung.documented for backend in backends_in(options) for rung in backend.rungs):
        beyond.append(f"--backend {options.backend}")
    _require_backend(options)
    if options.strategy in ALONG_THE_LADDER and beyond:
        raise UsageError(
            f"--strategy {options.strategy} follows the documented ladder, and {beyond[0]} is not part of it; "
            "leave it out, or use --strategy auto."
        )
    if options.documented and beyond:
        raise UsageError(f"--documented leaves out what {beyond[0]} asks for; give only one of them.")


def _require_backend(options: TuneOptions) -> None:
    """UsageError for rungs that --backend leaves out."""
    for name in options.rungs:
        if backend_of(RUNGS_BY_NAME[name]) not in backends_in(options):
            raise UsageError(f"--rung {name} is not among the rungs of --backend {options.backend}; use --backend all.")


def backends_in(options: TuneOptions) -> list[Backend]:
    """The backends whose rungs are tried."""
    return [backend for backend in BACKENDS.values() if options.backend in (ALL_BACKENDS, backend.option)]
