# mypy: disable-error-code="import-not-found"
"""Leaves the loop that it trains in, in the way that it is told, and writes files then."""

import atexit
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from few import Training, write


def by_counting(steps: int) -> None:
    training = Training(4000)
    batches = iter(training.loader)
    for _ in range(steps):
        training.step(next(batches))


def by_return(steps: int) -> int:
    training, made = Training(), 0
    while True:
        for batch in training.loader:
            training.step(batch)
            made += 1
            if made == steps:
                return made


def by_exit(steps: int) -> None:
    try:
        by_return(steps)
        sys.exit(0)
    finally:
        write("finally")


def in_a_thread(steps: int) -> None:
    thread = threading.Thread(target=by_counting, args=(steps,))
    thread.start()
    thread.join()


def by_error(steps: int) -> None:
    training = Training()
    with noted(), suppress(KeyError):
        for number, batch in enumerate(training.loader):
            training.step(batch)
            if number + 1 == steps:
                print({"lr": 1e-4}["loss"])


def accumulating(steps: int) -> None:
    training = Training(4000, gradient_accumulation_steps=4)
    batches = iter(training.loader)
    for _ in range(steps):
        for _ in range(4):
            with training.accelerator.accumulate(training.model):
                training.step(next(batches))


def losses() -> Iterator[Any]:
    training = Training(4000)
    batches = iter(training.loader)
    while True:
        yield training.step(next(batches))


def in_a_generator(steps: int) -> None:
    for number, _ in enumerate(losses()):
        if number + 1 == steps:
            break


@contextmanager
def noted() -> Iterator[None]:
    try:
        yield
    finally:
        write("noted")


atexit.register(write, "at the end")
globals()[sys.argv[1]](int(sys.argv[2]))
write("after")
