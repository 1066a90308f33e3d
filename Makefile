# make demo   fetch SmolLM2-135M and watch it answer          make test   install the test extra, run the suite
# make lint   ruff and mypy                                   make native-test   C++ tests under ASan and UBSan
#
# torch, for the tests only. The defaults take the CPU build; override either, for example
#   make test TORCH_SPEC=torch TORCH_INDEX="--index-url https://example.org/simple"
TORCH_SPEC  ?= torch==2.13.0
TORCH_INDEX ?=

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
