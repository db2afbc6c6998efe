"""The matrix of sampling options for a server, with the requests that find the tokens it needs.

Invariant: what is not played is in `RemoteMatrix.left_out`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cadenza.request import Request, SamplingParams
from cadenza.structured import StructuredOutput
from cadenza.verification.forms import CHARACTERS
from cadenza.verification.option_matrix import (
    BAD_WORD_FIELD,
    FORM_FIELD,
    OPTIONS,
    MatrixVocabulary,
    Option,
    OptionMatrix,
)
from cadenza.verification.remote_server import SENT_OPTIONS, RefusedError, RemoteServer
from cadenza.verification.workload import Arrival

NUM_WORDS = 24
MAX_TRIES = 1000

OF_KEYWORDS = frozenset("truefalsn")
"""Letters of JSON's keywords. Bad words end with another one, so that no keyword is ruled out."""

SENT_AS = {BAD_WORD_FIELD: "bad_words", FORM_FIELD: "structured"}
"""Options under another name than that of their field."""

UNSEEDED = "requests without a seed: the server draws another one for each"


def remote_options() -> tuple[Option, ...]:
    return tuple(
        replace(option, levels=option.levels[1:]) if option.name == "seed" else option
        for option in OPTIONS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMatrix:
    """What is played, and in words what is not."""

    matrix: OptionMatrix
    requests: tuple[Request, ...]
    left_out: tuple[str, ...]


def apply_matrix(
    server: RemoteServer, matrix: OptionMatrix, arrivals: Sequence[Arrival]
) -> RemoteMatrix:
    """The arrivals' requests with the options of a matrix, as far as they can be sent. Raises
    ConfigError if the server cannot be reached."""
    left_out = [UNSEEDED]
    for option in matrix.options:
        if SENT_AS.get(option.name, option.name) not in SENT_OPTIONS:
            matrix = matrix.without(option.name)
            left_out.append(f"{option.name}: the API has no field for it")
    words = _find_words(server)
    if len(words) < 2:
        matrix = matrix.without(BAD_WORD_FIELD)
        left_out.append("bad_words: no tokens were found that are words of letters")
    try:
        going_on = {character: _token_of(server, character) for character in CHARACTERS}
    except RefusedError as error:
        going_on, matrix = {}, matrix.without(FORM_FIELD)
        left_out.append(f"structured outputs: {error}")
    ends = _find_end(server, going_on.get("a"))
    if not ends:
        left_out.append("allowing the token that ends a text: it was not found")
    vocabulary = MatrixVocabulary(
        size=server.vocab_size,
        eos_token_ids=ends,
        going_on=frozenset(going_on.values()),
        words=words,
    )
    played = matrix.apply(arrivals, vocabulary)
    requests: list[Request] = []
    for each in played:  # the API takes bad words as texts
        texts = tuple(map(server.text_of, each.request.bad_word_token_ids))
        params = replace(each.request.params, bad_words=texts)
        requests.append(replace(each.request, params=params))
    return RemoteMatrix(matrix=matrix, requests=tuple(requests), left_out=tuple(left_out))


def _find_words(server: RemoteServer) -> tuple[int, ...]:
    """Tokens that are two letters or more, and what the tokenizer makes of their own text."""
    rng = random.Random(NUM_WORDS)  # noqa: S311  a workload, not a secret
    found: list[int] = []
    for token_id in rng.sample(range(server.vocab_size), min(MAX_TRIES, server.vocab_size)):
        text = server.text_of([token_id])
        is_word = len(text) > 1 and text.isascii() and text.isalpha()
        if is_word and text[-1] not in OF_KEYWORDS and server.tokens_of(text) == [token_id]:
            found.append(token_id)
            if len(found) == NUM_WORDS:
                break
    return tuple(found)


def _token_of(server: RemoteServer, character: str) -> int:
    """What the server chooses where only the character may follow. Raises RefusedError if the
    character is no token by itself, or there are no forms."""
    params = SamplingParams(
        max_tokens=2, temperature=0.0, structured=StructuredOutput(choice=[character])
    )
    token_ids = _play(server, params)
    if len(token_ids) != 1:
        raise RefusedError(f"the character {character!r} is not a token by itself")
    return token_ids[0]


def _find_end(server: RemoteServer, letter: int | None) -> tuple[int, ...]:
    """The token that ends a text: what is chosen where it or a letter may follow, but not that."""
    if letter is None:
        return ()
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        logit_bias={letter: -100.0},
        structured=StructuredOutput(regex="a?"),
    )
    token_ids = _play(server, params)
    return token_ids if server.text_of(token_ids) != "a" else ()


def _play(server: RemoteServer, params: SamplingParams) -> tuple[int, ...]:
    (stream,) = server.play(Request(prompt_token_ids=(1,), params=params)).streams
    return stream.token_ids
