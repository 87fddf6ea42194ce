# make demo                 train a small language model on real text (makes .venv first)
# make demo PYTHON=python   with another interpreter; a torch it can import is kept
# make test                 lint, types and every test but the slow ones
# make test WORKERS=4       in so many processes, a GB of memory each (2 by default)
# make test-slow            the slow ones, in so many processes too
# make test-nightly         those that .ci/run leaves out: before a release, and after a large change
# make test-again           those that failed last, one after the other
# make test-xla             those of XLA devices, in an environment of their own (6 GB)
# make site                 the documentation as a site: build/site/index.html
# make site VERSIONS='v0.1.0 main'  several tags or branches, with a choice of them in the sidebar
# Written for make 3.81, which macOS ships.

WORKERS ?= 2

# the first Python that is new enough; python.org, Debian, conda and pyenv name it differently
FIND_PYTHON = for p in python3 python python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; exit; }; done; \
	echo 'no-python-3.11-or-newer-found--name-one-with-PYTHON='

# PYTHON from the command line or the environment is an order; without one, an environment that exists is kept
ifneq ($(strip $(PYTHON)),)
SETUP_FLAGS := --rebuild-for-other-python
else
PYTHON := $(shell if test -f .venv/installed.json && .venv/bin/python -c ''; then echo .venv/bin/python; \
	else $(FIND_PYTHON); fi)
endif

SETUP := $(PYTHON) tools/environment.py $(SETUP_FLAGS)
# modules are run with -m: tools that came with a kept torch's environment have no script here
VENV := .venv/bin

# else every process that a test starts would compile the package anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo digits environment environment-slow environment-xla test test-slow test-nightly test-again test-xla lint docs site clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo:
	@$(SETUP) --extras demo
	@$(VENV)/python -m paceline demo

digits:
	@$(SETUP) --extras demo
	@$(VENV)/python -m paceline demo digits

environment:
	@$(SETUP) --extras dev

environment-slow:
	@$(SETUP) --extras dev,libraries,optimizers,trackers,stores,deepspeed,site,report,types

environment-xla:
	@$(PYTHON) tools/environment_xla.py

lint: environment
	@$(VENV)/python -m ruff check .
	@$(VENV)/python -m ruff format --check --quiet .
	@$(VENV)/python -m mypy

# a worker runs all tests of a file; conftest.py has the longest files first
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: lint
	@$(VENV)/python -m pytest -m "not slow and not nightly and not xla" $(PARALLEL) --durations 20

# pytest's status 5: no test of that kind
test-slow: environment-slow
	@$(VENV)/python -m pytest -m "slow and not nightly and not xla" $(PARALLEL) --durations 20 || test $$? -eq 5

test-nightly: environment-slow
	@$(VENV)/python -m pytest -m nightly $(PARALLEL) --durations 20

# those that failed last, one after the other
test-again:
	@$(VENV)/python -m pytest --last-failed --last-failed-no-failures none

# Where torch_xla cannot be had (status 75), the tests are skipped in .venv, by a reason that is expected (status 5: none
# ran). A failure of theirs is one.
test-xla:
	@$(PYTHON) tools/environment_xla.py; status=$$?; \
	if test $$status -eq 0; then .venv-xla/bin/python -m pytest -m xla tests/pytorch/distributed/test_xla.py; \
	elif test $$status -eq 75; then $(SETUP) --extras dev && \
		{ $(VENV)/python -m pytest -m xla tests/pytorch/distributed/test_xla.py || test $$? -eq 5; }; \
	else exit $$status; fi

# the parts of the documentation that are made from the code
docs:
	@$(SETUP) --extras dev
	@$(VENV)/python tools/docs.py
	@$(VENV)/python tools/parity_page.py
	@$(VENV)/python tools/optimizers.py
	@$(VENV)/python tools/notebooks.py --pages

site:
	@$(SETUP) --extras dev,site
	@$(VENV)/python tools/build_site.py $(if $(VERSIONS),--versions $(VERSIONS))

clean:
	rm -rf .venv .venv-xla build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
