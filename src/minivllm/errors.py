"""Every error that mini-vllm raises on purpose. Each message says what was wrong and what would be right."""


class MiniVLLMError(Exception):
    """Base of all errors raised on purpose; the command line prints them in one line, without a traceback."""


class ConfigError(MiniVLLMError, ValueError):
    """A setting of the engine has a value that cannot be used, or settings contradict each other."""


class RequestError(MiniVLLMError, ValueError):
    """One request is wrong; it is refused before any work is done and no other request is affected."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        #: Name of the offending field (``"temperature"``, ``"prompt"`` …), where there is one.
        self.param = param


class ModelError(MiniVLLMError):
    """A checkpoint cannot be loaded: missing, truncated, malformed, or of a kind that is not implemented."""


class BlockError(MiniVLLMError):
    """The block allocator was misused (double free, unknown block id): always a bug of the caller."""
