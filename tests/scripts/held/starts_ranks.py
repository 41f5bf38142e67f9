# mypy: disable-error-code="import-untyped, import-not-found, misc, no-untyped-call"
"""Starts the ranks of its training itself, in one of several ways; without one, it only starts what helps it."""

import multiprocessing
import subprocess
import sys

import torch.distributed.run
from accelerate import debug_launcher, notebook_launcher
from few import Training, model, rows

print(subprocess.run(args=["echo", "its commit"], capture_output=True, text=True, check=True).stdout, model(), rows(1))


def train() -> None:
    training = Training()
    for batch in training.loader:
        training.accelerator.backward(training.model(**batch).loss)


if sys.argv[1] == "notebook":
    notebook_launcher(train, num_processes=2)
elif sys.argv[1] == "debug":
    debug_launcher(train, num_processes=2)
elif sys.argv[1] == "torchrun":
    torch.distributed.run.main(["--nproc_per_node", "2", __file__, "helped"])
elif sys.argv[1] == "fork":
    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
else:
    train()
