# `make fast` before every commit, `make gate` before a merge, `make night` once a release. CONTRIBUTING.md says more.
.PHONY: fast checks format lint types layers unit gate night gpu coverage mutations lock hooks

# Two at a time, as two cores have it: the unit tests beside everything else.
fast:
	$(MAKE) --jobs 2 --output-sync=target unit checks

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

# Exactly what CI runs, in an environment of its own.
gate:
	bash .ci/run

# What takes too long for each merge. It writes its result into benchmarks/results/night.json and CONTRIBUTING.md.
night:
	python scripts/night.py

# On a machine with a GPU; again until it says that all have run. It writes into benchmarks/results/gpu-tests/.
gpu:
	pytest tests/gpu --part-seconds 540

coverage:
	pytest --numprocesses 2 --cov --cov-report=term tests/unit tests/simulated

mutations:
	python scripts/mutate.py

lock:
	python scripts/lock.py

hooks:
	pre-commit install
