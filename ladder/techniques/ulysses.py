"""Ulysses: ranks share each sequence, by DeepSpeed's sequence parallelism (arXiv 2309.14509).

At stage 3 alone: below it DeepSpeed 0.19.8 makes the gradient as many times too large as there are ranks, which Adam
does not notice, but clipping does (measured: 2.403 instead of 1.201 with two ranks at stages 1 and 2, 1.201 at 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
    Terms,
    TrainerOnly,
)
from ladder.techniques.worth import SURE, WORTH
from ladder.workload.workload import Workload

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Whose attention transformers hands to Ulysses as a whole, with keys of as many heads as their configuration says."""
_IN_ENVIRONMENT = ("torchrun", "sbatch")
"""Exports that can hold environment variables."""


class Ulysses(Technique):
    name = "ulysses"
    title = "shared sequences"
    slot = "sequences"
    consent = Consent(
        caution="ranks share each sequence, as --allow ulysses permits: train with the Trainer in this environment "
        "for one epoch, on data with position_ids and without packing; evaluation is not shared, and was "
        "shown to fit with sequences as long as a rank's part alone"
    )
    libraries = (Library("accelerate", "accelerate", since="1.12"),)  # from then on it has `sp_size`
    rank_module = "ladder.trial.techniques.ulysses"
    effects = Effects(shares_sequence=True)
    why_not = (
        "sequences are shared at stage 3, by two or more GPUs of one host by which heads and sequence length "
        "divide, for causal-lm with llama, mistral, qwen2 or qwen3 and attention without a window"
    )
    shares_sequences = True
    is_tried_everywhere = False

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """Whether the ranks can work on one sequence, each on its part.

        Each rank has some of the heads, so their number divides by the ranks (or the ranks by that of the keys). It
        knows no mask but the causal one: a sliding window would silently be the whole sequence. Between nodes the
        exchange was never tried.
        """
        workload, ranks = problem.workload, problem.world_size
        model, keys = workload.model, workload.model.num_kv_heads
        return (
            rung.stage == 3
            and problem.num_nodes == 1
            and ranks > 1
            and workload.task == "causal-lm"
            and model.model_type in _FAMILIES
            and not _has_window(workload)
            and workload.seq_len % ranks == 0
            and model.num_heads % ranks == 0
            and (keys % ranks == 0 or ranks % keys == 0)
        )

    def engines(self, problem: Problem, engines: Sequence[Engine], peak: Callable[[Candidate], int]) -> list[Engine]:
        """Those of stage 3 with hardly room for one sequence.

        Where a sequence fits, be it on other kernels, sharing it saves nothing that is wanted, and costs the exchange
        of heads; where not even its part fits, or what does not fit are the parameters, it is no help.
        """
        sequences = problem.workload.global_batch_size // problem.world_size

        def needs(engine: Engine) -> int:
            """With one sequence at a time, all layers checkpointed."""
            return peak(Candidate(engine, 1, 1, sequences * engine.ranks_of_a_sequence(problem.world_size)))

        limit = problem.memory_limit
        alone = {engine: needs(engine) for engine in engines if not engine.has_slot_of(self)}
        roomy = {engine.rung for engine, taken in alone.items() if taken <= SURE * limit}
        sharing = []
        for engine, taken in alone.items():
            if engine.rung in roomy or not self.suits(problem, engine.rung) or "nvme" in engine.rung.devices:
                continue
            shared = engine.having(self)
            part = needs(shared)
            if part <= limit and taken - part > WORTH * limit:
                sharing.append(shared)
        return sharing

    def configure(self, config: dict[str, Any]) -> None:
        # transformers, which makes the model, and the Trainer hold it against as many sequences as there are ranks.
        del config["train_batch_size"]

    def costs(self, terms: Terms, workload: Workload, candidate: Candidate, world_size: int) -> Terms:
        """A rank keeps its part of a sequence, what attention made of its heads and what it got for it, and copies.

        The copies exist while heads are exchanged (measured: 6 to 8 bytes a query's value). Queries, keys, values and
        what attention makes of them are exchanged in each pass.
        """
        model = workload.model
        shared = 2 * model.num_heads * model.head_dim
        heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
        passes = 2.0 + candidate.checkpointed
        sent = passes * model.num_layers * terms.tokens * 2.0 * heads * (world_size - 1) / world_size
        return replace(terms, attention=terms.attention + shared, passing=terms.passing + 3 * shared, exchange=sent)

    def environment(self, world_size: int) -> dict[str, str]:
        """What accelerate reads where nobody gives it a ParallelismConfig: no file of the Trainer's has a place."""
        return {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "true",
            "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
            "PARALLELISM_CONFIG_SP_SIZE": str(world_size),
        }

    def only_the_trainer(self, world_size: int) -> TrainerOnly | None:
        return TrainerOnly(
            f"All {world_size} ranks share each sequence, as the exports below tell the Hugging Face Trainer.",
            (
                f"Sequences have position_ids (torch.arange of their length), and a length that divides by "
                f"{world_size}.",
                "They are neither packed nor padded on the left: attention sees all that comes before a token.",
                "Training is one epoch of the data: accelerate's loader ends later ones early. Repeat the data "
                "instead.",
                "Evaluation is not shared: there each rank has whole sequences, or shorter ones if they do not fit.",
            ),
        )

    def export(self, program: str) -> Export | str:
        if program in _IN_ENVIRONMENT:
            return Export({})
        return (
            "in this answer ranks share each sequence, as the environment tells the Trainer and no file can; "
            f"take --for {' or '.join(_IN_ENVIRONMENT)}"
        )


def _has_window(workload: Workload) -> bool:
    """As transformers reads the configuration: Mistral's has a window where it names none, Qwen's where it says so."""
    config, kind = workload.model.config, workload.model.model_type
    is_used = config.get("use_sliding_window", not kind.startswith("qwen"))
    windowed = is_used and config.get("sliding_window", 4096 if kind != "llama" else None) is not None
    return bool(windowed or any(layer != "full_attention" for layer in config.get("layer_types") or ()))


ULYSSES = Ulysses()
