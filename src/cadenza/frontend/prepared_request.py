"""`PreparedRequest`: a request, and how its output is made; `TextWorkers`: what is done elsewhere.

Plain values, of `TextFrontend`.
"""

from dataclasses import dataclass

from cadenza.engine.open_requests import RequestTimes
from cadenza.engine.request_check import RequestCheck
from cadenza.frontend.image_prompts import PixelSource, Spanned
from cadenza.request import Request
from cadenza.text.answers.output_parser import MakeParser
from cadenza.text.schemas.grammar import FormChecks
from cadenza.text.schemas.grammar_check import IN_PROCESS


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A resolved request (`TextFrontend.resolve`), and how its output is made.

    Args:
        text: the prompt's text, where it was given as text.
        make_parser: of its samples' parsers; None leaves the text whole.
        passed: the check that it has passed, if it has.
        makes_receipt: whether finished samples have a receipt (`receipts.with_receipt`).
        pending: the prompt whose images have no pixels yet (`TextFrontend.with_pixels`).
        times: is filled in by the engine, where somebody wants them.
    """

    text: str | None
    request: Request
    make_parser: MakeParser | None = None
    passed: RequestCheck | None = None
    makes_receipt: bool = False
    pending: Spanned | None = None
    times: RequestTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWorkers:
    """What is done for a text front end elsewhere.

    Args:
        checks: of the forms of requests.
        pixels: of images; None: by processes of its own.
    """

    checks: FormChecks = IN_PROCESS
    pixels: PixelSource | None = None


NO_WORKERS = TextWorkers()
