"""Where keys and values live: block tables, the pool's memory, and its size."""
