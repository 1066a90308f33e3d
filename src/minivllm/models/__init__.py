"""Checkpoints: what the decoder looks like and where its weights are, for each file format."""
