#!/usr/bin/env bash
# Written by ladder for llama-2-7b on 4 × NVIDIA A100-SXM4-40GB:
# zero3+param-cpu+opt-cpu ckpt=off mb=2, 13,183 tokens/s, peak 27.18 GiB of 40.00 GiB per GPU.
# Warning: simulated on the paper machine a100-40: no trial was run, so nothing here is measured or proven.
#
# A script that uses accelerate, with torch.optim.AdamW(…, fused=True) and no DummyOptim:
#   bash /work/main/best_config.launch.sh train.py --its-own arguments
# Each of its micro-steps, loss, backward, step and zero_grad, goes inside `with accelerator.accumulate(model):`, so that
# 16 of them make an optimizer step.
# Gradient checkpointing was off; no configuration file can switch it, so such a script sets it on its model.
#
# A script that uses the Hugging Face Trainer: the same, with these arguments after its own. They are also in
# /work/main/best_config.trainer.json, for HfArgumentParser.parse_json_file.
#   bash /work/main/best_config.launch.sh train.py --deepspeed /work/main/best_config.json --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_accumulation_steps 16 --activation_checkpointing false --bf16 true --max_grad_norm 1.0 --optim adamw_torch_fused
#
# A script that calls deepspeed.initialize(model=…, optimizer=…, config='/work/main/best_config.json'):
# the exports below, then
#   torchrun --standalone --nproc_per_node 4 train.py --its-own arguments
# With its optimizer offloaded it must be deepspeed.ops.adam.DeepSpeedCPUAdam(…, adamw_mode=True); DeepSpeed refuses a torch optimizer here.
# Where transformers builds its model in shards (HfDeepSpeedConfig), deepspeed.init_distributed() comes before that.
set -euo pipefail

if [ $# -eq 0 ]; then
  echo "usage: bash $0 train.py [its arguments]" >&2
  exit 2
fi

# As in the trials. Without a thread count the launchers give every rank one, which starves an optimizer on
# the CPU; without what torch's allocator is told here, more memory is needed than was measured.
export OMP_NUM_THREADS=32
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

exec accelerate launch --config_file /work/main/best_config.accelerate.yaml "$@"
