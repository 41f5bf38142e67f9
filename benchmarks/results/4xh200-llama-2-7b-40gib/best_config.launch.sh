#!/usr/bin/env bash
# Written by ladder for llama-2-7b on 4 × NVIDIA H200:
# zero3 ckpt=on mb=4, 30,747 tokens/s, peak 39.00 GiB of 40.00 GiB per GPU.
#
# A script that uses accelerate, with a torch optimizer and no DummyOptim:
#   bash /tmp/auto/best_config.launch.sh train.py --its-own arguments
# Gradient checkpointing was on; no configuration file can switch it, so such a script sets it on its model.
#
# A script that uses the Hugging Face Trainer: the same, with these arguments after its own. They are also in
# /tmp/auto/best_config.trainer.json, for HfArgumentParser.parse_json_file.
#   bash /tmp/auto/best_config.launch.sh train.py --deepspeed /tmp/auto/best_config.json --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 8 --gradient_checkpointing true --gradient_checkpointing_kwargs '{"use_reentrant": false}' --bf16 true --max_grad_norm 1.0 --optim adamw_torch_fused
#
# A script that calls deepspeed.initialize(model=…, optimizer=…, config='/tmp/auto/best_config.json'):
# the exports below, then
#   torchrun --standalone --nproc_per_node 4 train.py --its-own arguments
set -euo pipefail

if [ $# -eq 0 ]; then
  echo "usage: bash $0 train.py [its arguments]" >&2
  exit 2
fi

# Without a thread count of ours the launchers give every rank one, which starves the optimizer on the CPU.
export OMP_NUM_THREADS=16

exec accelerate launch --config_file /tmp/auto/best_config.accelerate.yaml "$@"
