"""Ulysses: DeepSpeed's sequence parallelism, in which ranks share each sequence (arXiv 2309.14509).

Only at stage 3: at lower stages DeepSpeed 0.19.8 multiplies the gradient by the number of ranks, which does not change
Adam's steps but does change clipping (measured: 2.403 instead of 1.201 with two ranks at stages 1 and 2, 1.201 at 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ladder.candidates import (
    Candidate,
    Consent,
    Effects,
    Engine,
    Export,
    Library,
    Problem,
    Rung,
    Technique,
    TrainerOnly,
)
from ladder.techniques.worth import SURE, WORTH

_IN_ENVIRONMENT = ("torchrun", "sbatch")
"""Exports that can hold environment variables."""


class Ulysses(Technique):
    name = "ulysses"
    title = "shared sequences"
    slot = "sequences"
    consent = Consent(
        caution="ranks share each sequence (--allow ulysses): train with the Trainer in this environment for one "
        "epoch, on data with position_ids and without packing; evaluation is not shared, and is only proven to fit "
        "with sequences as long as one rank's part"
    )
    libraries = (Library("accelerate", "accelerate", since="1.12"),)  # from then on it has `sp_size`
    rank_module = "ladder.trial.techniques.ulysses"
    effects = Effects(shares_sequence=True)
    why_not = (
        "sequences are shared at stage 3, by two or more GPUs of one host whose number divides the heads and the "
        "sequence length, for causal-lm with attention without a window"
    )
    shares_sequences = True
    is_tried_everywhere = False

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """Whether the ranks can share a sequence.

        Each rank has some of the heads, so the number of ranks must divide them (or the key heads the ranks). Only
        causal attention works: a sliding window would silently become the whole sequence. Several nodes are untested.
        """
        workload, ranks = problem.workload, problem.world_size
        model, keys = workload.model, workload.model.num_kv_heads
        return (
            rung.stage == 3
            and problem.num_nodes == 1
            and ranks > 1
            and workload.task == "causal-lm"
            and model.has_plain_attention
            and workload.seq_len % ranks == 0
            and model.num_heads % ranks == 0
            and (keys % ranks == 0 or ranks % keys == 0)
        )

    def engines(self, problem: Problem, engines: Sequence[Engine], peak: Callable[[Candidate], int]) -> list[Engine]:
        """Engines of stage 3 that hardly have memory for one sequence.

        If a sequence fits, perhaps with other kernels, sharing it only costs the exchange of heads. If not even a
        rank's part fits, or if it is the parameters that do not fit, sharing does not help.
        """
        sequences = problem.workload.global_batch_size // problem.world_size

        def needs(engine: Engine) -> int:
            """Predicted bytes with one sequence at a time and all layers checkpointed."""
            return peak(Candidate(engine, 1, 1, sequences * engine.ranks_of_a_sequence(problem.world_size)))

        limit = problem.memory_limit
        alone = {engine: needs(engine) for engine in engines if not engine.has_slot_of(self)}
        roomy = {engine.rung for engine, taken in alone.items() if taken <= SURE * limit}
        sharing = []
        for engine, taken in alone.items():
            if engine.rung in roomy or not self.gets_into(engine.rung, problem) or "nvme" in engine.rung.devices:
                continue
            shared = engine.having(self)
            part = needs(shared)
            if part <= limit and taken - part > WORTH * limit:
                sharing.append(shared)
        return sharing

    def configure(self, config: dict[str, Any]) -> None:
        # transformers and the Trainer would compare it with one sequence per rank, and fail.
        del config["train_batch_size"]

    def environment(self, world_size: int) -> dict[str, str]:
        """Variables for accelerate's ParallelismConfig, which the Trainer's files cannot set."""
        return {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "true",
            "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
            "PARALLELISM_CONFIG_SP_SIZE": str(world_size),
        }

    def only_the_trainer(self, world_size: int) -> TrainerOnly | None:
        return TrainerOnly(
            f"All {world_size} ranks share each sequence; the exports below configure the Hugging Face Trainer for it.",
            (
                f"Sequences need position_ids (torch.arange of their length), and a length that is a multiple of "
                f"{world_size}.",
                "Do not pack them or pad them on the left: attention sees everything before a token.",
                "Train for one epoch, because accelerate's loader ends later epochs early; repeat the data instead.",
                "Evaluation is not shared: each rank has whole sequences; use shorter ones if they do not fit.",
            ),
        )

    def export(self, program: str) -> Export | str:
        if program in _IN_ENVIRONMENT:
            return Export({})
        return (
            "in this answer ranks share each sequence, which only environment variables can configure; "
            f"use --for {' or '.join(_IN_ENVIRONMENT)}"
        )


ULYSSES = Ulysses()
