"""Every route: path, method, who may use it, what it takes and answers. One table.

The router, the door's policy and the API's description are all made of it. Invariant: a path that
is not in the table needs a key before it is not found.
"""

from dataclasses import dataclass
from typing import Literal

from cadenza.server.fields import Endpoint

Policy = Literal["open", "key"]
"""`open` answers anybody and tells nothing of any request; `key` needs an API key, if there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRoute:
    """One route. `answers` names the schema of a 200; `statuses` are its other ones.

    400 (a head beyond its bounds), 401 and 405 go with all of them.
    """

    name: str
    method: Literal["GET", "POST"]
    path: str
    policy: Policy
    summary: str
    answers: str
    statuses: tuple[int, ...] = ()
    body: Endpoint | None = None


_BODY = (400, 413, 415)
_GENERATION = (*_BODY, 404, 429, 500, 503, 504)

ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        name="chat",
        method="POST",
        path="/v1/chat/completions",
        policy="key",
        summary="Answer a conversation.",
        answers="ChatCompletion",
        statuses=_GENERATION,
        body="chat",
    ),
    ApiRoute(
        name="completions",
        method="POST",
        path="/v1/completions",
        policy="key",
        summary="Continue prompts.",
        answers="Completion",
        statuses=_GENERATION,
        body="completions",
    ),
    ApiRoute(
        name="cancel",
        method="POST",
        path="/v1/requests/{id}/cancel",
        policy="key",
        summary="End an open request of one's own.",
        answers="Cancelled",
        statuses=(404,),
    ),
    ApiRoute(
        name="models",
        method="GET",
        path="/v1/models",
        policy="key",
        summary="The models that are served.",
        answers="ModelList",
    ),
    ApiRoute(
        name="model",
        method="GET",
        path="/v1/models/{id:path}",
        policy="key",
        summary="One of them.",
        answers="Model",
        statuses=(404,),
    ),
    ApiRoute(
        name="tokenize",
        method="POST",
        path="/tokenize",
        policy="key",
        summary="Text to token ids.",
        answers="Tokenized",
        statuses=(*_BODY, 404, 429, 500),
        body="tokenize",
    ),
    ApiRoute(
        name="detokenize",
        method="POST",
        path="/detokenize",
        policy="key",
        summary="Token ids to text.",
        answers="Detokenized",
        statuses=(*_BODY, 404, 429, 500),
        body="detokenize",
    ),
    ApiRoute(
        name="health",
        method="GET",
        path="/health",
        policy="open",
        summary="Are requests served?",
        answers="Health",
        statuses=(503,),
    ),
    ApiRoute(
        name="live",
        method="GET",
        path="/live",
        policy="open",
        summary="Is the front end there?",
        answers="Health",
    ),
    ApiRoute(
        name="ready",
        method="GET",
        path="/ready",
        policy="open",
        summary="Are requests served?",
        answers="Health",
        statuses=(503,),
    ),
    ApiRoute(
        name="ping",
        method="GET",
        path="/ping",
        policy="open",
        summary="Are requests served? For SageMaker.",
        answers="Health",
        statuses=(503,),
    ),
    ApiRoute(
        name="ping_post",
        method="POST",
        path="/ping",
        policy="open",
        summary="The same.",
        answers="Health",
        statuses=(503,),
    ),
    ApiRoute(
        name="load",
        method="GET",
        path="/load",
        policy="key",
        summary="Calls that are open, for load balancers.",
        answers="Load",
    ),
    ApiRoute(
        name="tokenizer_info",
        method="GET",
        path="/tokenizer_info",
        policy="key",
        summary="The tokenizer's special tokens and chat template.",
        answers="TokenizerInfo",
    ),
    ApiRoute(
        name="metrics",
        method="GET",
        path="/metrics",
        policy="key",
        summary="Counts, for Prometheus.",
        answers="Metrics",
    ),
    ApiRoute(
        name="version",
        method="GET",
        path="/version",
        policy="key",
        summary="Cadenza's version.",
        answers="Version",
    ),
    ApiRoute(
        name="openapi",
        method="GET",
        path="/openapi.json",
        policy="key",
        summary="This description.",
        answers="OpenApi",
    ),
)

OPEN_PATHS = frozenset(route.path for route in ROUTES if route.policy == "open")
