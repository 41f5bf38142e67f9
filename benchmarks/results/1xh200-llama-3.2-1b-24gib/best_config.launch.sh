#!/usr/bin/env bash
# Written by ladder for llama-3.2-1b on 1 × NVIDIA H200:
# zero2+opt-cpu ckpt=on mb=4, 33,683 tokens/s, peak 21.43 GiB of 24.00 GiB per GPU.
#
# A script that uses accelerate, with a torch optimizer and no DummyOptim:
#   bash /tmp/run1/best_config.launch.sh train.py --its-own arguments
# Gradient checkpointing was on; no configuration file can switch it, so such a script sets it on its model.
#
# A script that uses the Hugging Face Trainer: the same, with these arguments after its own. They are also in
# /tmp/run1/best_config.trainer.json, for HfArgumentParser.parse_json_file.
#   bash /tmp/run1/best_config.launch.sh train.py --deepspeed /tmp/run1/best_config.json --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 32 --gradient_checkpointing true --gradient_checkpointing_kwargs '{"use_reentrant": false}' --bf16 true --max_grad_norm 1.0 --optim adamw_torch_fused
#
# A script that calls deepspeed.initialize(model=…, optimizer=…, config='/tmp/run1/best_config.json'):
# the exports below, then
#   torchrun --standalone --nproc_per_node 1 train.py --its-own arguments
# With its optimizer offloaded it must be deepspeed.ops.adam.DeepSpeedCPUAdam(…, adamw_mode=True); DeepSpeed refuses a torch optimizer here.
set -euo pipefail

if [ $# -eq 0 ]; then
  echo "usage: bash $0 train.py [its arguments]" >&2
  exit 2
fi

# Without a thread count of ours the launchers give every rank one, which starves the optimizer on the CPU.
export OMP_NUM_THREADS=16

exec accelerate launch --config_file /tmp/run1/best_config.accelerate.yaml "$@"
