# make demo    plan, train and compare with the prediction, on this machine
# make test    all tests (no GPU needed)
# make lint    ruff, pyright, import-linter
#
# Each target makes the virtual environment first, with the pinned versions.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OUT ?= demo-out

# One thread a process: the tests start as many processes as this has cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# A private folder, so that a stale lock of another build cannot hang DeepSpeed.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions

.PHONY: demo test lint format benchmark clean

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py --out $(OUT)

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(INSTALLED)
	$(BIN)/python -m benchmarks.memory_accuracy --out benchmarks/results

# torch comes first and alone: DeepSpeed and fairscale need it to build, and without the
# constraint a build of several GB would be fetched.
$(INSTALLED): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OUT) build *.egg-info
