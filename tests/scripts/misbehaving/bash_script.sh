#!/usr/bin/env bash
# The script that a user starts: it sets the environment up, then trains.
set -euo pipefail
export TOKENIZERS_PARALLELISM=false
here=$(dirname "$(readlink -f "$0")")
exec python "$here/../causal_trainer.py" --model_name_or_path model --train_file text/train.jsonl \
    --output_dir from-bash --max_steps 2 "$@"
