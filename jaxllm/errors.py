"""Every error jaxllm raises on purpose.

A message is one line that names the field, the value and what would be accepted. The CLI prints it and exits with 2;
the server turns it into an OpenAI-shaped error body.
"""


def one_line(text: object, most: int = 300) -> str:
    """Somebody else's words on one printable line, and not as long as they like."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(text).split()))[:most]


class JaxLLMError(Exception):
    """Base of all errors below: catching it catches everything jaxllm says on purpose."""


class ConfigError(JaxLLMError):
    """A setting (flag, YAML key, variable, keyword argument) that cannot be honoured."""


class ModelNotFoundError(ConfigError):
    """A model argument that is no built-in name, directory, file or reachable hub id."""


class CheckpointError(JaxLLMError):
    """A checkpoint that is corrupt, truncated, or not of the architecture it claims."""


class InvalidRequestError(JaxLLMError):
    """A request that cannot be honoured; `param` names the offending field in the OpenAI error body."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class QueueFullError(JaxLLMError):
    """The waiting queue is at its limit; the client should retry later."""


class EngineDeadError(JaxLLMError):
    """The engine loop has stopped; every running request fails with this."""
