# Set-up, checks, tests and the demo. Each target does what it needs first; nothing is installed twice.
#
# Needs python3.11 with venv, make, gcc and libnuma. On Debian: apt-get install python3.11 python3.11-venv make gcc libnuma1
#
# The locks in requirements/ name the CPU build of torch, which is not on PyPI. Where pip is not configured to find it, give
# PyTorch's index of CPU wheels in the environment: PIP_EXTRA_INDEX_URL=... make venv
# They are whole locks, installed with --no-deps: vLLM's own dependencies would pull torchvision, torchaudio and torchcodec in
# CUDA builds, which a CPU torch cannot import.

PYTHON ?= python3.11
PYTEST_ARGS ?=
VLLM ?= 0.32.0
OLD_VLLM ?= 0.27.1
MINUTES ?= 20

NEW := .venv
OLD := .venv-$(OLD_VLLM)
SIM_SEEDS ?= 0:5000
SIM_STEPS ?= 200
PIP_FLAGS := --quiet --no-deps --disable-pip-version-check

.PHONY: sim venv venv-$(OLD_VLLM) environments lint test test-fast test-server test-engine test-long test-faults test-old soak demo clean
.DEFAULT_GOAL := test

venv: $(NEW)/.package
venv-$(OLD_VLLM): $(OLD)/.package

$(NEW)/.requirements: requirements/vllm-$(VLLM).txt
$(OLD)/.requirements: requirements/vllm-$(OLD_VLLM).txt

$(NEW)/.requirements $(OLD)/.requirements:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install $(PIP_FLAGS) -r $<
	touch $@

# setuptools is in the locks, so the build needs no environment of its own.
%/.package: %/.requirements pyproject.toml setup.py $(wildcard csrc/*.* csrc/kernels/*)
	$*/bin/pip install $(PIP_FLAGS) --no-build-isolation --editable .
	touch $@

lint: venv
	$(NEW)/bin/ruff check .
	$(NEW)/bin/ruff format --check .
	$(NEW)/bin/mypy  # strict: pyproject.toml

test: environments lint test-fast test-server test-engine test-old

# Both at once: most of it is waiting.
environments:
	$(MAKE) -j2 venv venv-$(OLD_VLLM)

# Levels that need neither a server nor an engine.
test-fast: venv
	$(NEW)/bin/python -m pytest -m "not server and not engine and not gpu and not long" $(PYTEST_ARGS)

# 5,000 seeds of 200 steps are a million steps.
sim: venv
	$(NEW)/bin/python -m lmcache_mp_safe.testing.sim --seeds $(SIM_SEEDS) --steps $(SIM_STEPS) --jobs 2

test-server: venv
	$(NEW)/bin/python -m pytest -m "server and not engine and not long" $(PYTEST_ARGS)

test-engine: venv
	$(NEW)/bin/python -m pytest -m "engine and not gpu and not faults and not long" $(PYTEST_ARGS)

# Further cells of what test-fast and test-engine show.
test-long: venv
	$(NEW)/bin/python -m pytest -m "long and not gpu and not faults" $(PYTEST_ARGS)

# Real faults at every moment of a request; some of them are part of test-engine too.
test-faults: venv
	$(NEW)/bin/python -m pytest tests/engine/faults $(PYTEST_ARGS)

test-old: venv-$(OLD_VLLM)
	$(OLD)/bin/python -m pytest -m "old_vllm and not faults and not long" $(PYTEST_ARGS)

# Users, faults and a small pool for MINUTES minutes; every answer against a recompute's.
soak: venv
	$(NEW)/bin/python -m lmcache_mp_safe.testing.soak --minutes $(MINUTES)

demo: venv
	$(NEW)/bin/lmcache-mp-safe demo

clean:
	rm -rf $(NEW) $(OLD) build dist out *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
