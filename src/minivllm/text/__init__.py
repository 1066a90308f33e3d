"""Text to token ids and back, streams of text, and chat templates."""
