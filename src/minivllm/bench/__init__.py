"""Measurements: ``mini-vllm bench``, beside the machine's limits and, if wished, other engines."""
