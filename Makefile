# Each target sets up .venv by itself (.ci/setup_venv.py says how): a torch that is already there
# and new enough is kept, only what is missing is installed.
PYTHON ?= python3
ARGS ?=

RUN := .venv/bin/python
SETUP := @$(PYTHON) .ci/setup_venv.py

.PHONY: demo test lint format docs clean

demo:  ## train a tiny GPT in bf16 and in FP8, on the GPU where there is one
	$(SETUP) demo
	$(RUN) examples/train_gpt.py --preset tiny --recipe bf16 rowwise $(ARGS)

test:  ## the whole test suite, on all cores; ARGS="tests/test_layout.py -x" for a part of it
	$(SETUP) test
	$(RUN) -c "import xdist" 2>/dev/null && parallel="-n auto --dist worksteal"; \
	$(RUN) -m pytest $$parallel $(ARGS)

lint:  ## style, formatting and types
	$(SETUP) lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format:  ## what `make lint` wants to see
	$(SETUP) lint
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs:  ## docs/ as a site in site/; a link that leads nowhere is an error
	$(SETUP) docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean:  ## remove everything that the targets above made, .venv too
	rm -rf .venv build dist site *.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
