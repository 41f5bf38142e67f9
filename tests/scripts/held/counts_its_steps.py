# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""A loop that computes its steps from its options and the length of its loader; `names` says what these are called."""

import argparse
import math

from few import Training

OPTIONS = {
    "known": ("--per_device_train_batch_size", "--gradient-accumulation-steps"),
    "other": ("--bs", "--acc"),
    "by_hand": ("--bs", "--acc"),
}
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("names", choices=OPTIONS)
given = parser.parse_known_args()[0]
for option, dest, default in zip(OPTIONS[given.names], ("micro_batch", "accumulation"), (2, 4), strict=True):
    parser.add_argument(option, dest=dest, type=int, default=default)
args = parser.parse_args()
accumulation = {} if args.names == "by_hand" else {"gradient_accumulation_steps": args.accumulation}
training = Training(micro_batch=args.micro_batch, **accumulation)
if args.names == "by_hand":
    while True:
        for number, batch in enumerate(training.loader):
            training.accelerator.backward(training.model(**batch).loss)
            if number % args.accumulation == args.accumulation - 1:
                training.optimizer.step()
                training.optimizer.zero_grad()
steps, made = 100 * math.ceil(len(training.loader) / args.accumulation), 0
print(f"plans {steps} steps", flush=True)
while made < steps:
    for batch in training.loader:
        with training.accelerator.accumulate(training.model):
            training.step(batch)
        made += training.accelerator.sync_gradients
