"""Fields of other engines' requests that change an answer: vLLM's, SGLang's, llama.cpp's, LM
Studio's, Ollama's, TGI's and OpenRouter's.

Owns the one table of them. Each is an alias of a field with an equal meaning, or is refused by its
name unless its value asks for nothing; further ones are parts or labels of these and have no effect
by themselves. Invariant: no request is answered as if such a field were not there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from cadenza.server.errors import invalid_value, not_built
from cadenza.server.schemas.body import Alias, Body, Field, label, optional, unsupported
from cadenza.server.schemas.field_types import AnyJson, Integer, Schema, refuse

_HINT = AnyJson(max_chars=16 << 10)
_LENGTH = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_WHOLE_WINDOW = -1
_PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
_INLINED = ("extra_body", "options")


@dataclass(frozen=True, slots=True)
class AnyObject:
    """Any object."""

    def check(self, name: str, value: object) -> dict[str, Any]:
        if isinstance(value, dict):
            return cast(dict[str, Any], value)
        raise refuse(name, value, "an object")

    def schema(self) -> Schema:
        return {"type": "object"}


class OtherEnginesBody(Body):
    """The fields of every body that generates."""

    extra_body = optional(AnyObject(), "Its members count as fields of the body.")
    options = optional(AnyObject(), "Ollama's; its members count as fields of the body.")

    max_tokens: Field[Any] = Alias(*_LENGTH)
    max_completion_tokens: Field[Any] = Alias(*_LENGTH)
    max_output_tokens: Field[Any] = Alias(*_LENGTH)
    max_new_tokens: Field[Any] = Alias(*_LENGTH)
    n_predict: Field[Any] = Alias(*_LENGTH)
    num_predict: Field[Any] = Alias(*_LENGTH)
    min_new_tokens: Field[Any] = Alias("min_tokens")
    repeat_penalty: Field[Any] = Alias("repetition_penalty")
    stop: Field[Any] = Alias("stop_sequences")
    stop_sequences: Field[Any] = Alias("stop")
    truncate: Field[Any] = Alias("truncate_prompt_tokens")

    # Samplers. The numbers beside a switch matter only where it is on.
    mirostat: Field[Any] = unsupported("mirostat sampling", 0)
    mirostat_mode: Field[Any] = unsupported("mirostat sampling", 0)
    mirostat_tau: Field[Any] = label(_HINT)
    mirostat_eta: Field[Any] = label(_HINT)
    dry_multiplier: Field[Any] = unsupported("the DRY penalty", 0)
    dry_base: Field[Any] = label(_HINT)
    dry_allowed_length: Field[Any] = label(_HINT)
    dry_penalty_last_n: Field[Any] = label(_HINT)
    dry_sequence_breakers: Field[Any] = label(_HINT)
    xtc_probability: Field[Any] = unsupported("XTC sampling", 0)
    xtc_threshold: Field[Any] = label(_HINT)
    dynatemp_range: Field[Any] = unsupported("dynamic temperature", 0)
    dynatemp_exponent: Field[Any] = label(_HINT)
    typical_p: Field[Any] = unsupported("typical sampling", 1)
    typ_p: Field[Any] = unsupported("typical sampling", 1)
    tfs_z: Field[Any] = unsupported("tail-free sampling", 1)
    top_a: Field[Any] = unsupported("top-a sampling", 0)
    adaptive_target: Field[Any] = unsupported("adaptive-p sampling", -1)
    adaptive_decay: Field[Any] = label(_HINT)
    smoothing_factor: Field[Any] = unsupported("smoothed logits", 0)
    epsilon_cutoff: Field[Any] = unsupported("an epsilon cut-off", 0)
    eta_cutoff: Field[Any] = unsupported("an eta cut-off", 0)
    min_keep: Field[Any] = unsupported("samplers that keep several tokens", 0, 1)
    samplers: Field[Any] = unsupported("an order of the samplers", [])
    penalize_nl: Field[Any] = unsupported("a repetition penalty without line breaks", True)
    penalize_newline: Field[Any] = unsupported("a repetition penalty without line breaks", True)
    no_repeat_ngram_size: Field[Any] = unsupported("a ban on repeated n-grams", 0)
    encoder_repetition_penalty: Field[Any] = unsupported(
        "a penalty of what is not in the prompt", 1
    )
    guidance_scale: Field[Any] = unsupported("classifier-free guidance", 1)
    negative_prompt: Field[Any] = unsupported("classifier-free guidance", "")
    num_beams: Field[Any] = unsupported("beam search", 1)
    do_sample: Field[Any] = unsupported("greedy decoding by this field; send temperature 0", True)
    repeat_last_n = optional(
        Integer(_WHOLE_WINDOW, 1 << 31),
        "Only where there is no penalty, or -1: penalties cover the whole of prompt and output.",
    )
    logits_processors: Field[Any] = unsupported("logits processors", [])
    custom_logit_processor: Field[Any] = unsupported("logits processors", "")
    custom_params: Field[Any] = label(_HINT)
    stop_regex: Field[Any] = unsupported("stopping at an expression", "", [])
    no_stop_trim: Field[Any] = unsupported("leaving stop texts in by this field", False)

    # Forms of the answer; `GenerationBody` has them.
    response_format: Field[Any] = unsupported(
        "a form by this field at this endpoint", {"type": "text"}
    )
    structured_outputs: Field[Any] = unsupported("a form by this field at this endpoint")
    guided_json: Field[Any] = unsupported("a form by this field at this endpoint")
    guided_regex: Field[Any] = unsupported("a form by this field at this endpoint")
    guided_choice: Field[Any] = unsupported("a form by this field at this endpoint")
    guided_grammar: Field[Any] = unsupported("a form by this field at this endpoint")
    format: Field[Any] = unsupported("a form by this field at this endpoint", "")
    json_schema: Field[Any] = unsupported("a form by this field at this endpoint", {})
    grammar: Field[Any] = unsupported("a form by this field at this endpoint", "")
    regex: Field[Any] = unsupported("a form by this field at this endpoint", "")
    ebnf: Field[Any] = unsupported("a form by this field at this endpoint", "")
    structural_tag: Field[Any] = unsupported("structural tags", "")
    guided_whitespace_pattern: Field[Any] = unsupported("a pattern of the blanks in JSON")
    guided_decoding_backend: Field[Any] = label(_HINT)
    grammar_lazy: Field[Any] = unsupported("a grammar that begins at a trigger", False)

    # What the prompt consists of.
    system: Field[Any] = unsupported("a system text in a field of its own", "")
    instructions: Field[Any] = unsupported("a system text in a field of its own", "")
    template: Field[Any] = unsupported("a template of the request's own", "")
    context: Field[Any] = unsupported("going on from a context", [])
    images: Field[Any] = unsupported("images", [])
    image_data: Field[Any] = unsupported("images", [])
    input_ids: Field[Any] = unsupported("a prompt of token ids at this endpoint")
    input_embeds: Field[Any] = unsupported("a prompt of embeddings")
    previous_response_id: Field[Any] = unsupported(
        "going on from a stored response at this endpoint"
    )
    integrations: Field[Any] = unsupported("servers of tools", [])
    plugins: Field[Any] = unsupported("plug-ins", [])
    tools: Field[Any] = unsupported("calling tools at this endpoint", [])
    tool_choice: Field[Any] = unsupported("calling tools at this endpoint", "none", "auto")

    # The model.
    lora: Field[Any] = unsupported("a choice of LoRA adapters", [])
    lora_path: Field[Any] = unsupported("a choice of LoRA adapters", "")
    lora_request: Field[Any] = unsupported("a choice of LoRA adapters", {})
    adapters: Field[Any] = unsupported("a choice of LoRA adapters", "")
    adapter_id: Field[Any] = unsupported("a choice of LoRA adapters", "")
    session_params: Field[Any] = unsupported("sessions", {})
    models: Field[Any] = label(_HINT, "Models to fall back on; the one of `model` is served.")

    # What the answer holds beside its text, and how much of it.
    n: Field[Any] = unsupported("several answers at this endpoint", 1)
    logprobs: Field[Any] = unsupported("log probabilities at this endpoint", False, 0)
    top_logprobs: Field[Any] = unsupported("log probabilities at this endpoint", 0)
    prompt_logprobs: Field[Any] = unsupported("log probabilities at this endpoint")
    n_probs: Field[Any] = unsupported("log probabilities by this field; send logprobs", 0)
    top_n_tokens: Field[Any] = unsupported("log probabilities by this field; send logprobs", 0)
    decoder_input_details: Field[Any] = unsupported("log probabilities by this field", False)
    echo: Field[Any] = unsupported("beginning the answer with the prompt at this endpoint", False)
    return_full_text: Field[Any] = unsupported(
        "beginning the answer with the prompt by this field", False
    )
    suffix: Field[Any] = unsupported("filling in a middle", "")
    return_hidden_states: Field[Any] = unsupported("hidden states", False)
    return_token_ids: Field[Any] = unsupported("token ids in the answer at this endpoint", False)
    receipt: Field[Any] = unsupported("receipts at this endpoint", False)
    watermark: Field[Any] = unsupported("watermarks", False)
    n_indent: Field[Any] = unsupported("an indentation of the answer", 0)
    t_max_predict_ms: Field[Any] = unsupported("a bound on the time of an answer", 0, -1)

    # Labels.
    cache_prompt: Field[Any] = label(_HINT, "Prefixes are cached without it.")
    ttl: Field[Any] = label(_HINT, "The model stays loaded without it.")
    keep_alive: Field[Any] = label(_HINT, "The model stays loaded without it.")

    @classmethod
    def checked(cls, given: Mapping[str, object]) -> dict[str, Any]:
        values = super().checked(_inlined(given))
        window = values.get("repeat_last_n")
        penalties = {values.get(name, off) == off for name, off in _PENALTIES.items()}
        if window not in (None, _WHOLE_WINDOW) and penalties != {True}:
            what = "a window of the penalties, which cover the whole of prompt and output,"
            raise not_built("repeat_last_n", what, (_WHOLE_WINDOW,))
        return values


def _inlined(given: Mapping[str, object]) -> Mapping[str, object]:
    """The body with the members of its objects of fields beside its own. Raises ApiError (400)."""
    found, places = dict(given), dict[str, str]()
    for place in _INLINED:
        inner = given.get(place)
        members = cast(dict[str, object], inner) if isinstance(inner, dict) else {}
        for name, value in members.items():
            own, other = found.get(name), places.get(name, "")
            if own is not None and value is not None and own != value:
                raise invalid_value(
                    f"{other}{name} and {place}.{name} differ; give one of them", place
                )
            if own is None and name not in _INLINED:
                found[name], places[name] = value, f"{place}."
    return found
