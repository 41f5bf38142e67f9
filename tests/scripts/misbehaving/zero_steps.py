# mypy: disable-error-code="import-not-found"
"""Calls train(), but has no step to train: no epoch is asked for or, with --empty, no sample is left."""

import argparse

from few import texts, trainer
from transformers import TrainingArguments

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--empty", action="store_true", help="train on a data set without samples")
options = parser.parse_args()

found = texts()
if options.empty:
    found = found.filter(lambda row: len(row["input_ids"]) > 1000)

arguments = TrainingArguments(output_dir="zero", num_train_epochs=1 if options.empty else 0, report_to="none")
print(trainer(arguments, train_dataset=found).train())
