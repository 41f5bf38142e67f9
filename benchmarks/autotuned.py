"""One rank of the training that DeepSpeed's Autotuner measures: a plain loop round `deepspeed.initialize`.

    deepspeed [--autotuning run] benchmarks/autotuned.py SPEC.json --deepspeed_config CONFIG

`autotuner.py` writes SPEC.json and starts this. CONFIG is a file or, as the Autotuner passes it, one in base64. The
Autotuner ends a training itself once it has seen enough; otherwise it ends after `steps` of SPEC.json.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings

import torch
from one_rank import adam, begin, deepspeed_for, limit_memory, make_model, read_spec


def main() -> None:
    warnings.filterwarnings("ignore")  # the Autotuner takes any line with the word "error" for a failure
    logging.disable(logging.WARNING)  # Liger warns of an "ImportError" where a kernel for newer GPUs is not installed
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec")
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--local_rank", type=int)
    options = parser.parse_args()
    spec = read_spec(options.spec)
    if spec["gpus"]:  # DeepSpeed's launcher names slots, counted from the host's first GPU
        slots = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec["gpus"][int(slot)] for slot in slots)
    device = begin(spec)
    model = make_model(spec, device)
    limit_memory(spec["cap_gib"], device)
    engine, *_ = deepspeed_for(device).initialize(model=model, optimizer=adam(model), config=options.deepspeed_config)
    shape = (engine.train_micro_batch_size_per_gpu(), spec["seq_len"])
    ids = torch.randint(4, model.config.vocab_size, shape, device=device)
    for step in range(spec["steps"] * engine.gradient_accumulation_steps()):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        if step < engine.gradient_accumulation_steps():
            limit_memory(spec["cap_gib"], device)


if __name__ == "__main__":
    main()
