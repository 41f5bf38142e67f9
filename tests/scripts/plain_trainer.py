"""A Trainer script without DeepSpeed that reports how it trained."""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import transformers

out, words = Path(sys.argv[1]), sys.argv[2:]
(arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses(words)
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
)
model = transformers.LlamaForCausalLM(config)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(4, 128, (32, 16)).tolist()]
trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
done = trainer.train()
accelerator = trainer.accelerator
report = {
    "kind": accelerator.distributed_type.name,
    "sum": sum(float(each.detach().double().sum()) for each in trainer.model.parameters()),
    "weights": str(next(trainer.model.parameters()).dtype),
    "autocast": bool(accelerator.native_amp),
    "sequences": arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size,
    "clipping": arguments.max_grad_norm,
    "steps": trainer.state.global_step,
    "loss": done.training_loss,
    "cores": sorted(os.sched_getaffinity(0)),
    "float8": [name for name, each in trainer.model.named_modules() if type(each).__name__ == "Float8Linear"],
    "compiled": [name for name, each in trainer.model_wrapped.named_modules() if hasattr(each, "_orig_mod")],
}
(out / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(report))
if torch.distributed.is_initialized():  # as at the end of causal_trainer.py
    del accelerator, trainer, model
    gc.collect()
    torch.distributed.destroy_process_group()
