"""Every error Cadenza raises on purpose.

    CadenzaError
    ├── InvalidRequestError        the caller's request cannot be served as written
    │   ├── ContextLengthError     prompt and answer are longer than the model's context
    │   └── TextTooLongError       a text has more tokens than were allowed
    ├── QueueFullError             the bounded waiting queue is full; try again later
    ├── ConfigError                a flag or an option has a value that cannot work
    ├── CheckpointError            a model folder cannot be read or is not supported
    ├── DeviceUnavailableError     the asked-for device is not on this machine
    ├── EngineClosedError          the engine was shut down
    ├── EngineUnavailableError     it loads, drains, restarts or is dead; try again, or elsewhere
    ├── RunnerError                the device side broke its contract or failed
    └── CompileAfterWarmupError    a program was compiled after warm-up

A message says what was given (`show`), what is allowed and what to change. `AssertionError` is kept
for Cadenza's own bugs and is never reachable from user input.
"""

MAX_SHOWN_BITS = 64
MAX_SHOWN_CHARS = 40


class CadenzaError(Exception):
    """Base of the tree above."""


class InvalidRequestError(CadenzaError, ValueError):
    """The request cannot be served as written; `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together are longer than the model's context.

    Args:
        prompt_length: in words, say "300 tokens" or "at least 300 tokens".
        max_tokens: of the answer, None where the request left it open.
        is_prompt_alone: the prompt leaves no room for any answer.
    """

    def __init__(
        self,
        *,
        prompt_length: str,
        max_tokens: int | None,
        max_model_len: int,
        is_prompt_alone: bool,
    ) -> None:
        answer = "the answer needs one" if max_tokens is None else f"max_tokens is {max_tokens}"
        remedy = "shorten the prompt" if is_prompt_alone else "shorten the prompt or max_tokens"
        # Clients match the first words.
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens (--max-model-len); the "
            f"prompt has {prompt_length} and {answer}: {remedy}",
            param="prompt" if is_prompt_alone else "max_tokens",
        )


class TextTooLongError(InvalidRequestError):
    """A text has more tokens than were allowed. `num_tokens` is None where they were not counted,
    because the number of characters was enough to tell; `length` says in words what is known."""

    def __init__(self, message: str, *, num_tokens: int | None, length: str) -> None:
        super().__init__(message, param="prompt")
        self.num_tokens = num_tokens
        self.length = length


class QueueFullError(CadenzaError):
    """The waiting queue is at its bound."""


class ConfigError(CadenzaError, ValueError):
    """An option's value cannot work."""


class CheckpointError(CadenzaError):
    """A model folder cannot be read, or holds something that is not supported."""


class DeviceUnavailableError(CadenzaError):
    """The asked-for device is not on this machine."""


class EngineClosedError(CadenzaError):
    """The engine was shut down."""


class EngineUnavailableError(CadenzaError):
    """The engine takes no requests now; in `retry_after_s` it may, None where it never will."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RunnerError(CadenzaError):
    """The device side broke the runner contract, or failed."""


class CompileAfterWarmupError(CadenzaError):
    """A program was compiled after warm-up had declared the set complete."""


def show(value: object) -> str:
    """Any value in a message: on one line and short, an integer too long to print by its size."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  a `repr` may fail with anything, say on a huge integer within
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
