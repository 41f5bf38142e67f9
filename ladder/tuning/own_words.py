"""The answer in the words of the user's own script: its command with values of the answer, which needs no ladder."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladder.backends.registry import is_main
from ladder.emit.answer import Answer, OwnWords
from ladder.emit.config import best_config, to_json
from ladder.emit.exporters.registry import EXPORTERS
from ladder.emit.files import OutputPaths
from ladder.emit.settings import settings_of
from ladder.emit.trainer import CHECKPOINTING, trainer_arguments, trainer_command_line
from ladder.errors import UsageError
from ladder.tuning.told import Place, Told
from ladder.workload.script import KNOWN_OPTIONS, OwnEngine, Script, ScriptFacts
from ladder.workload.workload import mixed_precision

_MOST_LOOKS, _MOST_SECONDS = 6, 120.0
"""For the place of one value. Chosen: a look costs what the start of the script costs."""
_SOUNDS_LIKE = {"micro_batch": ("batch", "bs"), "accumulation": ("acc",)}
Look = Callable[[Sequence[str]], Script]


def in_own_words(answer: Answer, paths: OutputPaths, look: Look, note: Callable[[str], None]) -> OwnWords | None:
    """The command that trains the answer without ladder: of the script, its arguments, and what the answer changes.

    The Trainer's options and keys are known by name; others are found by experiment, and what is emitted is looked at:
    that look must see the answer's values and the steps of the script's own. `note` gets what it sees otherwise, and
    None is returned, as for a script that cannot be told: `ladder run` then starts it.
    """
    script = answer.workload.script
    if script is None or not _may_be_told(answer, script.facts):
        return None
    with tempfile.TemporaryDirectory(prefix="ladder-words-") as folder:  # the answer's files are not written yet
        (Path(folder) / paths.config.name).write_text(to_json(best_config(answer)), encoding="utf-8")
        return _Search(answer, paths, look, Path(folder)).found(script, note)


def _may_be_told(answer: Answer, facts: ScriptFacts) -> bool:
    """Whether words alone can say the answer to a script."""
    engine = answer.candidate.engine
    if facts.generation is not None or not facts.program or _starter(facts) == "other":
        return False
    of_deepspeed = is_main(engine.rung)
    # On a CPU accelerate overlooks FSDP2, and DeepSpeed where its own launcher says it.
    by_accelerate = facts.kind == "accelerate" or not of_deepspeed
    is_overlooked = answer.device == "cpu" and by_accelerate and (of_deepspeed or engine.rung.stage > 0)
    if facts.kind == "trainer":
        said = [(technique.binds_cores, technique.trainer_arguments()) for technique in engine.techniques]
        # A dictionary would take the place of the script's own, with all that it says.
        beyond = any(binds or not told or dict in map(type, told.values()) for binds, told in said)
    else:
        beyond = any(technique.binds_cores or technique.rank_module for technique in engine.techniques)
    # DeepSpeed refuses torch's optimizers there; accelerate and trials put its own in their place.
    is_refused = facts.kind == "deepspeed" and engine.rung.offload_optimizer != "none"
    return not (beyond or is_overlooked or is_refused)


def _starter(facts: ScriptFacts) -> Any:
    """What starts it without ladder."""
    return "accelerate" if facts.kind == "accelerate" else facts.launcher


@dataclass(frozen=True)
class _Search:
    """For the words that say an answer."""

    answer: Answer
    paths: OutputPaths
    look: Look
    folder: Path

    def found(self, script: Script, note: Callable[[str], None]) -> OwnWords | None:
        facts = script.facts
        told = self._by_name(Told(script.command[len(script.command) - facts.num_arguments :]), facts)
        seen = None if told is None else self._seen(told, facts)
        if told is None or seen is None:
            note("The script does not take the answer's options, so `ladder run` starts it with the answer.")
            return None
        for what in KNOWN_OPTIONS:
            told, seen = self._by_experiment(what, told, seen, facts)
        if others := differing(self.answer, facts, seen):
            note(f"The script sets its {', '.join(others)} itself, so `ladder run` starts it with the answer.")
            return None
        arguments, files = told.written(self.paths.config.parent, self.paths.config.stem)
        return OwnWords((*facts.program, *arguments), _starter(facts), files)

    def _by_name(self, told: Told, facts: ScriptFacts) -> Told | None:
        """With what the Trainer or the script itself has a name for; None where the engine cannot be said."""
        rung = self.answer.candidate.engine.rung
        own = told.of_deepspeed()
        has_own = facts.engine is not None and facts.engine.stage is not None and not facts.engine.fsdp2
        if has_own and (not own or not is_main(rung)):
            return None
        for name in own:
            told = told.instead(name, str(self.paths.config))
        if facts.kind == "trainer":
            return self._as_the_trainer_names_it(told, facts, of_backend=not own)
        for what in (each for each in KNOWN_OPTIONS if each in facts.options):
            told = told.at(Place(facts.options[what]), _wanted(self.answer, what))
        return told

    def _as_the_trainer_names_it(self, told: Told, facts: ScriptFacts, of_backend: bool) -> Told | None:
        arguments = trainer_arguments(self.answer, self.paths.config, of_backend=of_backend)
        if of_its_own := [each for each in EXPORTERS.values() if each.program and each.program == facts.program]:
            arguments = of_its_own[0].training_words(settings_of(self.answer), self.paths.config)
        if facts.takes_options:
            return replace(told, arguments=(*told.arguments, *shlex.split(trainer_command_line(arguments))))
        changed = {name: value for name, value in arguments.items() if not self._is_so(name, value, facts)}
        section = told.named(tuple(KNOWN_OPTIONS.values()))
        if section is None:
            return told if changed.keys() <= set(KNOWN_OPTIONS.values()) else None
        for name, value in changed.items():
            told = told.at(replace(section, keys=(*section.keys, name)), value)
        return told

    def _is_so(self, name: str, value: Any, facts: ScriptFacts) -> bool:
        """Whether the script was seen to have this argument of the Trainer, or has no use for it."""
        engine = facts.engine or OwnEngine()
        known: dict[str, Any] = {
            KNOWN_OPTIONS["micro_batch"]: facts.micro_batch,
            KNOWN_OPTIONS["accumulation"]: facts.accumulation,
            "per_device_eval_batch_size": None if facts.evaluates else value,
            "max_grad_norm": facts.gradient_clipping,
            "optim": value,  # the script's own, whatever it is called
            "use_cpu": facts.uses_cpu,
            "bf16": facts.dtype == "bf16",
            "fp16": facts.dtype == "fp16",
            **engine.arguments,
        }
        if name.startswith((CHECKPOINTING, "activation_checkpointing")):
            return engine.checkpointing is (not isinstance(value, bool) or value)
        return bool(known.get(name) == value)

    def _seen(self, told: Told, facts: ScriptFacts) -> ScriptFacts | None:
        """What a look sees under these words; None where the script refuses them."""
        arguments, files = told.written(self.folder, "copy")
        config, there = str(self.paths.config), str(self.folder / self.paths.config.name)
        for path, text in files.items():
            path.write_text(text.replace(config, there), encoding="utf-8")
        here = [word.replace(config, there) for word in arguments]
        module_or_file = ("python", *facts.program) if facts.program[0] == "-m" else facts.program
        launcher = {
            "torchrun": module_or_file,
            "accelerate": (
                "accelerate",
                "launch",
                "--mixed_precision",
                mixed_precision(self.answer.workload.dtype),
                *facts.program,
            ),
            "deepspeed": ("deepspeed", *facts.program),
        }
        try:
            return self.look([*launcher[_starter(facts)], *here]).facts
        except UsageError:
            return None

    def _by_experiment(self, what: str, told: Told, seen: ScriptFacts, own: ScriptFacts) -> tuple[Told, ScriptFacts]:
        """With the option or key that sets `what`, where changing it changes what a look sees: the answer's value."""
        wanted, now = _wanted(self.answer, what), getattr(seen, what)
        if now == wanted:
            return told, seen
        typed = told.places(now)
        parsed = [Place(option) for option, value in own.numbers.items() if value == now]
        like = _SOUNDS_LIKE[what]
        places = sorted(dict.fromkeys(typed + parsed), key=lambda place: not any(each in place.last for each in like))
        for place in places[: min(_MOST_LOOKS, int(_MOST_SECONDS / max(1.0, own.preparation_seconds)))]:
            changed = told.at(place, wanted)
            found = self._seen(changed, own)
            if found is not None and getattr(found, what) == wanted:
                return changed, found
        return told, seen


def _wanted(answer: Answer, what: str) -> int:
    return int(getattr(answer.candidate, what))


def differing(answer: Answer, own: ScriptFacts, seen: ScriptFacts) -> list[str]:
    """What a look at the script under the answer's words `seen` has of its own, by name."""
    candidate, workload = answer.candidate, answer.workload
    planned, again = (_steps(facts, answer) for facts in (own, seen))
    rung, engine = candidate.engine.rung, seen.engine
    by_accelerate = own.kind == "accelerate"  # its launcher says the engine, and its loop itself what it clips
    by_fsdp = bool(rung.stage) and not is_main(rung) and not by_accelerate
    if engine is None and own.takes_options and by_fsdp:  # before transformers 5, the Trainer does not say it
        engine = OwnEngine(rung.stage, checkpointing=candidate.gradient_checkpointing, fsdp2=True)
    stage = rung.stage if by_fsdp or (is_main(rung) and not by_accelerate) else None
    clipping = own.gradient_clipping if by_accelerate else workload.gradient_clipping
    pairs = {
        "micro-batch": (seen.micro_batch, candidate.micro_batch),
        "accumulation": (seen.accumulation, candidate.accumulation),
        "precision": (seen.precision, workload.dtype),
        "gradient checkpointing": (engine and engine.checkpointing, candidate.gradient_checkpointing),
        "engine": (engine and (engine.stage, engine.fsdp2), (stage, by_fsdp)),
        "gradient clipping": (seen.gradient_clipping, clipping),
        "trained parameters": (seen.num_trainable, own.num_trainable),
        "longest sample": (seen.longest, own.longest),
        "steps": (again, planned),
    }
    return [name for name, (one, other) in pairs.items() if one != other]


def _steps(facts: ScriptFacts, answer: Answer) -> tuple[int | None, ...]:
    planned = facts.planned(answer.workload.global_batch_size, answer.world_size)
    return () if planned is None else (planned.optimizer_steps, planned.schedule_steps, planned.samples)
