"""``mini-vllm bench serve``: load on any server that speaks OpenAI's API, and how it bears it."""
