"""`ladder sbatch`: writes a Slurm job that tunes."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer

from ladder.cli.declared import takes
from ladder.cli.tune_words import words_of
from ladder.errors import EXIT_FOUND, UsageError
from ladder.launch.counting import counting
from ladder.machine.described import bare_machine
from ladder.machine.environment import ranks_in
from ladder.machine.interpreter import is_own, ranks_python
from ladder.options.declaring import checked
from ladder.options.job import JobOptions, mem_of, require_known
from ladder.options.tune import TuneOptions
from ladder.text import shown

_TEMPLATE = "tune.sbatch.jinja"


@takes(TuneOptions, JobOptions)
def sbatch(options: TuneOptions, job: JobOptions) -> int:
    """Write a Slurm job that tunes, with the options of `ladder tune`. Neither a GPU nor Slurm is needed here.

    If its time is up, the job queues itself again and continues. For a job that trains: `ladder export --for sbatch`.

    Examples:

      ladder sbatch llama-2-7b --gpus 8 --account me --time 02:00:00 --job-file tune.sbatch

      ladder sbatch llama-2-7b --gpus 8 | sbatch

      ladder sbatch --gpus 2 -- train.py --lr 1e-5
    """
    from ladder.emit.files import require_file_name, write_atomically

    if job.print_template:
        typer.echo(_built_in(), nl=False)
        return EXIT_FOUND
    options, job = checked(options), checked(job)
    if job.job_file is not None:
        require_file_name(job.job_file, "tune.sbatch")
    require_known(job)
    _require_possible(options)
    text = _rendered(job, _values(options, job))
    if job.job_file is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(job.job_file, text, mode=0o777)
        typer.echo(f"Wrote {job.job_file}")
    return EXIT_FOUND


def _require_possible(options: TuneOptions) -> None:
    """Raise what `ladder tune` would raise in the job, as far as it can be known here."""
    from ladder.machine.lease import Leases
    from ladder.options.checks import require_effective_options, require_text, require_workload
    from ladder.tuning.problem import micro_batches_of
    from ladder.tuning.run import space_of
    from ladder.tuning.tune_events import ignore
    from ladder.tuning.venues import venue_of
    from ladder.tuning.venues.nodes import gpus_of_a_node
    from ladder.tuning.workload_and_machine import workload_of
    from ladder.workload.source import resolve_model

    require_workload(options)
    require_text(options)
    require_effective_options(options)
    with Leases(wait=False, note=_silent, cancelled=lambda: False) as leases:
        if options.nodes and options.nodes > 1:  # those of the job, which is yet to come
            gpus_of_a_node(options.gpus or 0, options.nodes)
        else:
            venue_of(options, leases, ignore, lambda: False)
        if options.launcher == "simulated":
            space_of(options, leases)
            return
    if options.script or options.gpus == 0:
        return
    machine = bare_machine(options.gpus or 1, 0)  # which GPU the job gets is not known here
    workload = workload_of(
        resolve_model(options.model, task=options.trained_task, count=counting()), options, machine, _silent
    )
    if options.gpus is not None:
        micro_batches_of(workload, options.gpus, options.micro_batches)


def _silent(sentence: str) -> None:
    """The tune itself tells what is worth knowing."""


def _values(options: TuneOptions, job: JobOptions) -> dict[str, Any]:
    """What the template fills in."""
    here = Path.cwd()
    with ranks_in(options.python, options.script, must_train=False):
        if not is_own():  # the job activates ladder's environment, in which another one may be found
            options = replace(options, python=ranks_python())
    name = _slug(Path(options.script[0]).stem if options.script else options.model)
    if options.run_dir is None:
        # Jobs of other tunes in this folder have histories of their own.
        words = words_of(options)
        digest = hashlib.sha256(shlex.join(words).encode()).hexdigest()[:8]
        options = replace(options, run_dir=Path("ladder-runs") / f"{name}-job-{digest}")
    assert options.run_dir is not None
    options = replace(options, run_dir=here / options.run_dir)
    nodes = options.nodes or 1
    return {
        "job_name": f"ladder-{name}",
        "account": job.account or "",
        "partition": job.partition or "",
        "time": job.time or "",
        "mem": mem_of(job, options.host_memory, nodes),
        "cpus": job.cpus_per_task or "",
        "nodes": nodes,
        "gpus": job.gpus_per_node or (options.gpus or 0) // nodes or "",
        "options": job.job_options,
        "environment": _environment(Path(sys.prefix)),
        "folder": shlex.quote(str(here)),
        "tune": shlex.join(["ladder", "tune", *words_of(options)]),
        "requeues": job.requeues,
    }


def _environment(prefix: Path) -> list[str]:
    """The lines that make the job find this very ladder."""
    activate = prefix / "bin" / "activate"
    if activate.exists():
        return [f"source {shlex.quote(str(activate))}"]
    return [f'export PATH={shlex.quote(str(prefix / "bin"))}:"$PATH"']


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name.rstrip("/").rsplit("/", 1)[-1]).strip("-.") or "tune"


def _built_in() -> str:
    return (files("ladder.cli") / _TEMPLATE).read_text(encoding="utf-8")


def _rendered(job: JobOptions, values: Mapping[str, Any]) -> str:
    """The job. UsageError, in one sentence, for a template that cannot be filled in."""
    import jinja2

    name = "the built-in template" if job.template is None else f"--template {shown(str(job.template))}"
    try:
        source = _built_in() if job.template is None else job.template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{name} cannot be read ({reason}); start from `ladder sbatch --print-template`.") from None
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    try:
        return environment.from_string(source).render(values)
    except jinja2.UndefinedError as error:
        known = ", ".join(values)
        raise UsageError(f"{name}: {error.message}; the names that ladder fills in are {known}.") from None
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"{name}, line {error.lineno}: {error.message}; correct it there.") from None
    except jinja2.TemplateError as error:
        raise UsageError(f"{name}: {error.message}; correct it there.") from None
