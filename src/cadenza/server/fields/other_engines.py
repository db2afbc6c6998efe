"""Other engines' request fields that change an answer (vLLM, SGLang, llama.cpp, LM Studio, Ollama,
TGI, TabbyAPI, OpenRouter): each an alias, or refused by name unless its value asks for nothing.
Invariant: no request is answered as if such a field were absent."""

from collections.abc import Mapping
from typing import Any, ClassVar

from cadenza.request import DEFAULTS, PARAMETERS
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.fields.body import Alias, Body, Field, label, labels, optional, unsupported
from cadenza.server.fields.types import AnyJson, Integer, checked_dict, field_type, members_of

_HINT = AnyJson(max_chars=16 << 10)
_WHOLE_WINDOW = -1
PENALTIES = {name: off for name, off in DEFAULTS.items() if name.endswith("_penalty")}
"""Of the text so far, each with the value that penalises nothing."""
_INLINED = ("extra_body", "options")


@field_type({"type": "object"})
def any_object(name: str, value: object) -> dict[str, Any]:
    return checked_dict(name, value)


def _each(names: str, what: str, *harmless: object) -> dict[str, Field[Any]]:
    return {name: unsupported(what, *harmless) for name in names.split()}


def _names_of_parameters() -> dict[str, Field[Any]]:
    found: dict[str, Field[Any]] = {}
    for name, each in PARAMETERS.items():
        declared = (name, *each.renamed)
        names = (*(declared if each.renamed else ()), *each.also)
        found |= {other: Alias(*declared) for other in names}
    return found


_BANNED = "banning tokens by another field than logit_bias (-100)"
_SAMPLERS: Mapping[str, Field[Any]] = {
    **_each("mirostat mirostat_mode", "mirostat sampling", 0),
    "dry_multiplier": unsupported("the DRY penalty", 0),
    "xtc_probability": unsupported("XTC sampling", 0),
    "dynatemp_range": unsupported("dynamic temperature", 0),
    **_each("typical_p typ_p", "typical sampling", 1),
    "tfs_z": unsupported("tail-free sampling", 1),
    "top_a": unsupported("top-a sampling", 0),
    "adaptive_target": unsupported("adaptive-p sampling", -1),
    # Parameters of the samplers above.
    **labels(
        "mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n "
        "dry_sequence_breakers xtc_threshold dynatemp_exponent adaptive_decay custom_params",
        _HINT,
    ),
    "smoothing_factor": unsupported("smoothed logits", 0),
    "epsilon_cutoff": unsupported("an epsilon cut-off", 0),
    "eta_cutoff": unsupported("an eta cut-off", 0),
    "min_keep": unsupported("samplers that keep several tokens", 0, 1),
    "samplers": unsupported("an order of the samplers", []),
    **_each("penalize_nl penalize_newline", "a repetition penalty without line breaks", True),
    "no_repeat_ngram_size": unsupported("a ban on repeated n-grams", 0),
    "encoder_repetition_penalty": unsupported("a penalty of what is not in the prompt", 1),
    "guidance_scale": unsupported("classifier-free guidance", 1),
    "negative_prompt": unsupported("classifier-free guidance", ""),
    "num_beams": unsupported("beam search", 1),
    "do_sample": unsupported("greedy decoding by this field; send temperature 0", True),
    "logits_processors": unsupported("logits processors", []),
    "custom_logit_processor": unsupported("logits processors", ""),
    "stop_regex": unsupported("stopping at an expression", "", []),
    "no_stop_trim": unsupported("leaving stop texts in by this field", False),
    **_each("banned_strings", "banning texts by another field than bad_words", []),
    **_each("banned_tokens token_banned_list", _BANNED, []),
    "custom_token_bans": unsupported(_BANNED, ""),
    "ban_eos_token": unsupported("going on after the end by another field than ignore_eos", False),
    "repeat_last_n": optional(
        Integer(_WHOLE_WINDOW, 1 << 31),
        "Only where there is no penalty, or -1: penalties cover the whole of prompt and output.",
    ),
}
_FORM = "a form by this field at this endpoint"
_FORMS: Mapping[str, Field[Any]] = {
    "response_format": unsupported(_FORM, {"type": "text"}),
    **_each("structured_outputs guided_json guided_regex guided_choice guided_grammar", _FORM),
    "format": unsupported(_FORM, ""),
    "json_schema": unsupported(_FORM, {}),
    **_each("grammar regex ebnf", _FORM, ""),
    "structural_tag": unsupported("structural tags", ""),
    "guided_whitespace_pattern": unsupported("a pattern of the blanks in JSON"),
    "guided_decoding_backend": label(_HINT),
    "grammar_lazy": unsupported("a grammar that begins at a trigger", False),
}
"""`GenerationBody` has most of them."""
_PROMPT: Mapping[str, Field[Any]] = {
    **_each("system instructions", "a system text in a field of its own", ""),
    "template": unsupported("a template of the request's own", ""),
    "response_prefix": unsupported(
        "the answer's beginning by this field, not as the last turn", ""
    ),
    "context": unsupported("going on from a context", []),
    **_each("images image_data", "images", []),
    "input_ids": unsupported("a prompt of token ids at this endpoint"),
    "input_embeds": unsupported("a prompt of embeddings"),
    "previous_response_id": unsupported("going on from a stored response at this endpoint"),
    "integrations": unsupported("servers of tools", []),
    "plugins": unsupported("plug-ins", []),
    "tools": unsupported("calling tools at this endpoint", []),
    "tool_choice": unsupported("calling tools at this endpoint", "none", "auto"),
}
_LORA = "a choice of LoRA adapters"
_MODEL: Mapping[str, Field[Any]] = {
    "lora": unsupported(_LORA, []),
    **_each("lora_path adapters adapter_id", _LORA, ""),
    "lora_request": unsupported(_LORA, {}),
    "session_params": unsupported("sessions", {}),
    "models": label(_HINT, "Models to fall back on; the one of `model` is served."),
}
_LOGPROBS = "log probabilities at this endpoint"
_ANSWER: Mapping[str, Field[Any]] = {
    "n": unsupported("several answers at this endpoint", 1),
    "logprobs": unsupported(_LOGPROBS, False, 0),
    "top_logprobs": unsupported(_LOGPROBS, 0),
    "prompt_logprobs": unsupported(_LOGPROBS),
    **_each("n_probs top_n_tokens", "log probabilities by this field; send logprobs", 0),
    "decoder_input_details": unsupported("log probabilities by this field", False),
    "echo": unsupported("beginning the answer with the prompt at this endpoint", False),
    "return_full_text": unsupported("beginning the answer with the prompt by this field", False),
    "suffix": unsupported("filling in a middle", ""),
    "return_hidden_states": unsupported("hidden states", False),
    "return_token_ids": unsupported("token ids in the answer at this endpoint", False),
    "receipt": unsupported("receipts at this endpoint", False),
    "watermark": unsupported("watermarks", False),
    "n_indent": unsupported("an indentation of the answer", 0),
    "t_max_predict_ms": unsupported("a bound on the time of an answer", 0, -1),
    "cache_prompt": label(_HINT, "Prefixes are cached without it."),
    "ttl": label(_HINT, "The model stays loaded without it."),
    "keep_alive": label(_HINT, "The model stays loaded without it."),
}
"""Further content of the answer, and hints."""


class OtherEnginesBody(Body):
    """The fields of every body that generates."""

    extra_body = optional(any_object, "Its members count as fields of the body.")
    options = optional(any_object, "Ollama's; its members count as fields of the body.")
    more: ClassVar[Mapping[str, Field[Any]]] = {
        **_names_of_parameters(),
        "template_vars": Alias("chat_template_kwargs"),
        **_SAMPLERS,
        **_FORMS,
        **_PROMPT,
        **_MODEL,
        **_ANSWER,
    }

    @classmethod
    def checked(cls, given: Mapping[str, object]) -> dict[str, Any]:
        values = super().checked(_inlined(given))
        window = values.get("repeat_last_n")
        penalties = {values.get(name, off) == off for name, off in PENALTIES.items()}
        if window not in (None, _WHOLE_WINDOW) and penalties != {True}:
            what = "a window of the penalties, which cover the whole of prompt and output,"
            raise not_built("repeat_last_n", what, (_WHOLE_WINDOW,))
        return values


def _inlined(given: Mapping[str, object]) -> Mapping[str, object]:
    found, origins = dict(given), dict[str, str]()
    for origin in _INLINED:
        for name, value in members_of(given.get(origin)).items():
            own, other = found.get(name), origins.get(name, "")
            if own is not None and value is not None and own != value:
                raise invalid_value(
                    f"{other}{name} and {origin}.{name} differ; give one of them", origin
                )
            if own is None and name not in _INLINED:
                found[name], origins[name] = value, f"{origin}."
    return found
