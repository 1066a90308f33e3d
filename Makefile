# make demo          fetch SmolLM2-135M and watch it write            the second run starts in seconds
# make test          install the test extra, run the whole suite
# make lint          ruff and mypy
# make native-test   the C++ tests, under AddressSanitizer and UBSan
# make benchmark     every row of benchmark_results.csv, in hours; it may be stopped and started again
# make clean         remove what these built (the fetched model stays in its cache directory)
#
# torch serves the tests and the benchmark only, as their reference. By default pip finds it on its own index; on Linux
# PyPI's wheel is the CUDA build (gigabytes), and the CPU build is taken with
#   make test TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu"
# TORCH_SPEC is the requirement, TORCH_INDEX any options that pip needs to find it.
TORCH_SPEC  ?= torch==2.13.0
TORCH_INDEX ?=

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := build/native-sanitized
# What the installed extension depends on; Python files are used in place (editable install).
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl')

.PHONY: demo test lint native-test benchmark install clean
.DELETE_ON_ERROR:

demo: install
	$(BIN)/mini-vllm pull smollm2-135m
	$(BIN)/mini-vllm generate smollm2-135m "Once upon a time, there was a" --max-tokens 96 --temperature 0

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

native-test: $(VENV)/.build
	$(BIN)/cmake -S . -B $(NATIVE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	    -DMINIVLLM_PYTHON=OFF -DMINIVLLM_TESTS=ON -DMINIVLLM_SANITIZE=ON
	$(BIN)/cmake --build $(NATIVE)
	$(BIN)/ctest --test-dir $(NATIVE) --output-on-failure

benchmark: $(VENV)/.bench
	PYTHON=$(abspath $(BIN))/python benchmarks/kv_cache.sh

install: $(VENV)/.installed

# --- the steps, each redone only when what it depends on has changed ---

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "mini-vllm needs Python 3.10 or newer; $(PYTHON) is `$(PYTHON) -V`. Try: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, sysconfig, os, sys; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' 2>/dev/null \
	    || { echo "Python's venv module or headers are missing. On Debian and Ubuntu: apt install python3-venv python3-dev"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null \
	    || { echo "A C++17 compiler is needed. On Debian and Ubuntu: apt install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# The build tools stay in the environment, so that a rebuild is incremental.
$(VENV)/.build: $(VENV)/.venv
	$(BIN)/pip install --quiet "pip>=24" "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.20" ninja
	touch $@

$(VENV)/.installed: $(VENV)/.build $(SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation -e .
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(BIN)/pip install --quiet $(TORCH_INDEX) "$(TORCH_SPEC)"
	$(BIN)/pip install --quiet --no-build-isolation -e '.[test]'
	touch $@

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/pip install --quiet $(TORCH_INDEX) "$(TORCH_SPEC)"
	$(BIN)/pip install --quiet --no-build-isolation -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
