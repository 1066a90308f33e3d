"""The loop: requests in, outputs out."""
