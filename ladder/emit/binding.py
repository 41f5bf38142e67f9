"""Binding ranks to cores in a launch script, which starts itself again as the first program of each rank."""

from __future__ import annotations

from ladder.emit.answer import Answer
from ladder.machine.cores import usable_by_place

_START = 'bash "$0" --rank "$@"'


def started(answer: Answer) -> tuple[list[str], str, str]:
    """Lines before all others, an option for the launcher, and what it starts: the script and its arguments.

    Without bound cores: no line, no option, and "$@".
    """
    binding = [technique for technique in answer.candidate.engine.techniques if technique.binds_cores]
    if not binding:
        return [], "", '"$@"'
    shares = binding[0].cores_of_ranks(usable_by_place(), answer.world_size // answer.num_nodes)
    cores = " ".join(",".join(map(str, share)) for share in shares)
    lines = [
        "# The launcher starts each rank by this script again, which binds it to the cores on which it was measured.",
        'if [ "${1-}" = --rank ]; then',
        "  shift",
        f"  cores=({cores})",
        '  exec taskset --cpu-list "${cores[$LOCAL_RANK]}" python "$@"',
        "fi",
    ]
    return lines, " --no_python", _START
