"""What the trial server imports before it forks ranks."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ladder.trial.of_deepspeed import is_installed
from ladder.workload.workload import Task

# Otherwise every rank of every trial would import these.
_PRELOAD = (
    "transformers.integrations.deepspeed",
    "transformers.integrations.sdpa_attention",
    "transformers.loss.loss_utils",
    "accelerate",
    "ladder.trial.rank",
)
_OF_DEEPSPEED = (
    "deepspeed.ops.adam",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "ladder.trial.backends.deepspeed",
)
# Optional: every engine of DeepSpeed looks here for one more optimizer that ZeRO supports.
_PRELOAD_IF_THERE = ("deepspeed.runtime.zero.muon.muon_optimizer",)
# Some of the above import these if they are installed, and bitsandbytes and parts of torchao then initialise CUDA.
# A trial that needs one calls `unhide`.
HIDDEN = ("bitsandbytes", "torchao")


class UnknownModelError(Exception):
    """The installed transformers cannot use the model's configuration."""


def preload(
    model_config: dict[str, Any] | None, task: Task, also: Sequence[str] = (), if_there: Sequence[str] = ()
) -> None:
    """Import everything that a rank needs, except the operators; of `if_there` what can be imported.

    Without a `model_config` no model's module is imported: a user's script brings its own.
    """
    for module in HIDDEN:
        sys.modules[module] = None  # type: ignore[assignment]  # importing it then raises ImportError
    if _on_gpus():
        from ladder.trial.forked_cuda import check_begun

        check_begun()
    for module in (*(_OF_DEEPSPEED if is_installed() else ()), *_PRELOAD, *also):
        importlib.import_module(module)
    for module in _PRELOAD_IF_THERE:
        with suppress(ImportError), _compiling_at_the_first_call():
            importlib.import_module(module)
    for module in if_there:
        with suppress(Exception):  # a module may refuse outside the program that imports it
            importlib.import_module(module)
    if model_config is None:
        return
    from ladder.trial.model_class import import_model

    try:
        import_model(model_config, task)
    except Exception as error:
        raise UnknownModelError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _compiling_at_the_first_call() -> Iterator[None]:
    """Within it, what `torch.compile` decorates is compiled when it is called first.

    Decorating alone imports torch's inductor: 2.3 to 3.7 s (measured on two hosts with H100 or H200).
    """
    import torch

    compile_now = torch.compile

    def compile_later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = functools.cache(lambda: compile_now(function, **options))

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            return compiled()(*given, **named)

        return call

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


def unhide(module: str) -> None:
    """Let a rank import a module that is hidden from the server, and whatever asked for it in vain ask again."""
    if sys.modules.get(module, module) is not None:
        return
    del sys.modules[module]
    for name in [name for name in sys.modules if name.endswith((f".{module}", ".bnb"))]:
        del sys.modules[name]
    for asked in ("transformers.utils.import_utils", "peft.import_utils"):
        for function in vars(sys.modules.get(asked, object)).values():
            if callable(getattr(function, "cache_clear", None)):
                function.cache_clear()


def load_operators(names: Sequence[str]) -> None:
    """Load the operators last. Raises RuntimeError if any import initialised CUDA: forked ranks could not use it."""
    from ladder.trial.operators import load

    for operator in names:
        load(operator)
    if _on_gpus():
        from ladder.trial.forked_cuda import check_begun

        check_begun().fail_if_unusable()


def _on_gpus() -> bool:
    return os.environ.get("DS_ACCELERATOR") == "cuda"
