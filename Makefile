# `make fast` before every commit, `make gate` before a merge, `make night` once a release. CONTRIBUTING.md says more.
.PHONY: try test tests fast checks format lint types layers unit gate night gpu coverage mutations lock hooks

# On a fresh machine: an environment in .venv, and a tune of a tiny model down to its best_config.json.
try:
	bash scripts/environment.sh train
	.venv/bin/ladder tune tiny-llama --gpus 0

# On a fresh machine: the same, and all tests but those of the night.
test:
	bash scripts/environment.sh dev
	.venv/bin/ladder tune tiny-llama --gpus 0
	. .venv/bin/activate && $(MAKE) tests

# What can share the machine, two at a time, and then what has to have it for itself. In their order, short tests come
# last, so that both cores work to the end. With REPORTS=FOLDER their results are kept there.
tests:
	pytest --quiet --numprocesses 2 --dist loadfile --no-loadscope-reorder -m 'not night and not alone' $(if $(REPORTS),--junitxml $(REPORTS)/beside.xml)
	pytest --quiet -m 'alone and not night' $(if $(REPORTS),--junitxml $(REPORTS)/alone.xml)

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
