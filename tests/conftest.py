"""What the markers mean: a test that needs torch, transformers or the real model says why it skips.

With MINIVLLM_REQUIRE_ALL=1, as CI sets it, a missing torch or transformers fails the test instead.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from minivllm.models.pull import pulled

_MODULES = {
    "torch": ("torch",),
    "transformers": ("torch", "transformers"),
    "bench": ("torch", "pandas", "matplotlib", "nbclient", "ipykernel"),
}


def find_real_model() -> Path | None:
    """SmolLM2's GGUF: $MINIVLLM_TEST_MODEL, or where ``mini-vllm pull smollm2-135m`` has left it."""
    chosen = os.environ.get("MINIVLLM_TEST_MODEL")
    return Path(chosen) if chosen else pulled("smollm2-135m")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, modules in _MODULES.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing and item.get_closest_marker(marker):
            reason = f"{' and '.join(missing)} not installed"
            if os.environ.get("MINIVLLM_REQUIRE_ALL") == "1":
                pytest.fail(f"{reason}, but MINIVLLM_REQUIRE_ALL=1", pytrace=False)
            pytest.skip(reason)
    if item.get_closest_marker("real_model") and find_real_model() is None:
        pytest.skip("SmolLM2 is not here: run `mini-vllm pull smollm2-135m`, or set MINIVLLM_TEST_MODEL")
