# `make fast` before every commit, `make all` before a merge. CONTRIBUTING.md says what each takes.
.PHONY: fast all checks format lint types layers unit tests faults nvme night coverage mutations lock hooks

# Two at a time, as two cores have it: the unit tests beside everything else.
fast:
	$(MAKE) --jobs 2 --output-sync=target unit checks

all: fast tests faults nvme

checks: format lint types layers

format:
	ruff format --check .

lint:
	ruff check .

types:
	mypy

layers:
	lint-imports

unit:
	pytest tests/unit

# All that the README's `pytest` runs, apart from the unit tests.
tests:
	pytest tests/simulated tests/contracts tests/process tests/gpu

faults:
	pytest tests/faults

nvme:
	pytest -m nvme

night:
	pytest -m night

coverage:
	pytest --numprocesses 2 --cov --cov-report=term tests/unit tests/simulated

# Minutes on two idle cores, and more the more survive: for a night, not for a commit.
mutations:
	python scripts/mutate.py

lock:
	python scripts/lock.py

hooks:
	pre-commit install
