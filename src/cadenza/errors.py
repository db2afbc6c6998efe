"""The exceptions. Messages say what was given (formatted by `show`), what is allowed and what to
change. `AssertionError` is for Cadenza's own bugs and is never reachable from user input."""

# CadenzaError
# ├── InvalidRequestError         the request cannot be served as written
# │   ├── ContextLengthError      prompt and max_tokens exceed the model's context
# │   ├── MessagesRefusedError    a chat template refuses the messages
# │   └── TextTooLongError        a text has more tokens than allowed
# ├── QueueFullError              the waiting queue is full; retry later
# ├── FormNotCheckedError         a structured output could not be checked; retry later
# ├── ConfigError                 an option has an invalid value
# ├── CheckpointError             a model folder cannot be read or is not supported
# ├── DeviceUnavailableError      the requested device is not available on this machine
# ├── EngineClosedError           the engine was shut down
# ├── EngineUnavailableError      the engine is loading, draining, restarting or dead
# ├── EngineStalledError          the engine computes nothing although requests are open
# ├── RunnerError                 the runner failed or broke its contract
# └── CompileAfterWarmupError     a program was compiled after warm-up

from math import ceil

MAX_SHOWN_BITS = 64
MAX_SHOWN_CHARS = 40


class CadenzaError(Exception):
    """Base class of all errors that Cadenza raises."""


class InvalidRequestError(CadenzaError, ValueError):
    """The request cannot be served as written; `param` names the invalid field, if known."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def must_be(param: str, given: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is {show(given)}; it must be {wanted}", param=param)


class ContextLengthError(InvalidRequestError):
    """The prompt and `max_tokens` (None if not set) together exceed `max_model_len`, in tokens.

    Args:
        prompt_length: as text, such as "300 tokens" or "at least 300 tokens".
        is_prompt_alone: the prompt alone fills the context, so shortening the answer does not help.
    """

    def __init__(
        self,
        *,
        prompt_length: str,
        max_tokens: int | None,
        max_model_len: int,
        is_prompt_alone: bool,
    ) -> None:
        self.prompt_length = prompt_length
        self.most_prompt_tokens = max_model_len - (max_tokens != 0)
        self.is_prompt_alone = is_prompt_alone
        answer = "the answer needs one" if max_tokens is None else f"max_tokens is {max_tokens}"
        remedy = "shorten the prompt" if is_prompt_alone else "shorten the prompt or max_tokens"
        # Clients match the beginning of this message.
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens (--max-model-len); the "
            f"prompt has {prompt_length} and {answer}: {remedy}",
            param="prompt" if is_prompt_alone else "max_tokens",
        )


class MessagesRefusedError(InvalidRequestError):
    """A chat template refuses messages, or fails on them."""


class TextTooLongError(InvalidRequestError):
    """A text has more tokens than allowed; `num_tokens` is None where it was refused by its
    characters."""

    def __init__(self, message: str, *, num_tokens: int | None, length: str) -> None:
        super().__init__(message, param="prompt")
        self.num_tokens = num_tokens
        self.length = length


class QueueFullError(CadenzaError):
    """The waiting queue is full, or too long. `retry_after_s`: until the request would have
    started; None if unknown."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class FormNotCheckedError(CadenzaError):
    """The process that checks structured outputs could not be started."""


class ConfigError(CadenzaError, ValueError):
    """An option has an invalid value."""


class CheckpointError(CadenzaError):
    """A model folder cannot be read or is not supported."""


class DeviceUnavailableError(CadenzaError):
    """The requested device is not available on this machine."""


class EngineClosedError(CadenzaError):
    """The engine was shut down."""


class EngineUnavailableError(CadenzaError):
    """The engine accepts no requests now. `retry_after_s`: until it does; None if unknown or
    never."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStalledError(CadenzaError):
    """The engine computes nothing although requests are open: a fault of its own."""


class RunnerError(CadenzaError):
    """The runner failed or broke its contract."""


class CompileAfterWarmupError(CadenzaError):
    """A program was compiled after warm-up, when every program should exist."""


def show(value: object) -> str:
    """`repr(value)` on one line, truncated; a huge integer by its bit length."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  `repr` may raise anything, for example on a nested huge int
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def show_size(num_bytes: int) -> str:
    """A size for people: 812.4 MiB, and 4096 bytes below 1 MiB."""
    if num_bytes < 1 << 20:
        return f"{num_bytes} bytes"
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def show_missing(num_bytes: int) -> str:
    """As `show_size`, rounded up."""
    tenth = (1 << 20) / 10
    return show_size(ceil(ceil(num_bytes / tenth) * tenth) if num_bytes >= 1 << 20 else num_bytes)
