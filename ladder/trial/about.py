"""Prints what torch can do here as one line of JSON: `python -m ladder.trial.about`."""

from __future__ import annotations

import json

import torch


def main() -> None:
    """Ask torch. This initialises CUDA, so it must not run in the process from which ranks are forked."""
    error = ""
    if torch.version.cuda is not None:
        try:
            torch.zeros(1, device="cuda")
        except Exception as problem:
            error = str(problem).splitlines()[0]
    nccl = torch.cuda.nccl.version() if torch.version.cuda is not None else None
    about = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda_works": torch.version.cuda is not None and not error,
        "cuda_error": error,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "cpu_bf16": _has_on_cpu("bf16"),
        "cpu_fp16": _has_on_cpu("fp16"),
        "architectures": torch.cuda.get_arch_list() if torch.version.cuda is not None else [],
    }
    print(json.dumps(about))


def _has_on_cpu(dtype: str) -> bool:
    """Whether oneDNN multiplies in this precision; DeepSpeed asks so before it trains in fp16 on a CPU."""
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported")())
    except Exception:  # this torch is built without oneDNN
        return False


if __name__ == "__main__":
    main()
