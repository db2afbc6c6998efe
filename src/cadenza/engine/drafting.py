"""`drafting_of`: how the sequences of a request draft.

Owns what a request's own wishes mean beside the engine's configuration. Knows no scheduler.
"""

from cadenza.core.drafts import Drafting, SharedAcceptance
from cadenza.core.prompt_lookup import PromptLookup
from cadenza.request import Request
from cadenza.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig

ON_REQUEST = SpeculativeConfig(method="ngram")
"""The drafts of a request that asks for some where the engine is configured for none."""


def drafting_of(
    request: Request, config: SpeculativeConfig | None, shared: SharedAcceptance | None = None
) -> Drafting | None:
    """For one sample; None if its steps verify no drafts.

    A request turns drafts on and off, and may ask for fewer in a step than the engine's `config`
    allows. A prediction asks for them, too, unless the request turns them off; they are then looked
    up, whatever the engine's method. `shared` is that of the engine's `Drafter`.
    """
    asked = request.params.drafts
    if asked is False or (asked is None and config is None and not request.prediction):
        return None
    chosen = config or ON_REQUEST
    if chosen.has_model and not request.prediction:
        if shared is None:
            return None
        acceptance = shared.start()
        return Drafting(
            source=None, most=_most(request, config), acceptance=acceptance, shared=shared
        )
    source = PromptLookup(
        shortest=chosen.prompt_lookup_min,
        longest=chosen.prompt_lookup_max,
        prediction=request.prediction,
    )
    return Drafting(source=source, most=_most(request, config))


def _most(request: Request, config: SpeculativeConfig | None) -> int:
    """Drafts in a step. A prediction is followed for long where it is right."""
    asked = request.params.drafts
    most = ON_REQUEST.num_speculative_tokens if config is None else config.num_speculative_tokens
    if config is None and request.prediction:
        most = MAX_SPECULATIVE_TOKENS
    if asked is None or asked is True:
        return most
    return asked if config is None else min(asked, most)
