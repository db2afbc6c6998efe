"""Tokenizers, chat templates, incremental detokenization and stop strings.

Owns the conversion between text and token ids. Knows no models, weights or batches. Invariant:
importing this package imports neither `tokenizers` nor `jinja2`; their first use does.

Modules:

- `tokenizer`: encoding and decoding with a tokenizer.json; refuses texts that cannot fit the
  context
- `length_bound`: the most characters that a token can stand for
- `control_tokens`: tokens that user text must not produce
- `chat`: chat templates
- `sandbox`, `bounds`: the limits under which a template runs
- `provenance`: which characters of a rendering come from the template
- `detokenizer`: text from a stream of tokens
- `decoder_stages`: the steps of a tokenizer's decoder, made incremental
- `stop`: stop strings in text that comes in pieces
- `bad_words`: bad words as token sequences
- `stable_prompts`: system prompts without the lines that agents change from call to call
- `message_forms`: forms of a conversation for templates that refuse the given one
- `notices`: log lines that are written once
- `json_schema`: JSON Schemas become grammars: their bounds, what is left out, which compiler reads
  one
- `schema_grammar`: the compiler of schemas: blanks, soft limits, lists without repetition, levels
  of what refers to itself
- `lark_rules`: rules and terminals of a grammar, each body once
- `schema_merge`: `allOf`, `anyOf`, `oneOf` and `$ref` with what stands beside them, as alternatives
- `schema_values`: the values of an enum beside bounds, and of schemas that have few
- `schema_numbers`: numbers within bounds as expressions
- `schema_patterns`: formats, and patterns that look around
- `grammar`: structured outputs as grammars, and the bounds of these
- `grammar_check`: whether a grammar can be followed, by a trial over bytes, and what is wrong with
  it
- `grammar_worker`: checks grammars, and texts against schemas, in processes that can be killed
- `schema_check`: whether a text is JSON of a schema, for keywords that no grammar holds
- `compile_threads`: threads that take the cheapest job first, and those of one request in turn
- `token_constraint`: grammars compiled to constraints over a tokenizer's tokens
- `thinking_constraint`: a bound on the tokens of thinking, over a grammar or any text
- `output_parser`: the protocol of parsers that split a sample's text into parts (content,
  reasoning, calls)
- `part_parser`: the parser of reasoning and tool calls
- `content_stops`: stop strings in the content of an answer that has parts
- `tool_calls`: the notations of tool calls by family
- `call_forms`: where calls begin and end in an answer
- `call_readers`: what is in them, as leniently as is certain
- `call_grammar`: what a call may be that the model begins by itself
- `call_constraint`: the constraint of an answer that may be any text with such calls
- `generic_tools`: tools and their results as messages, where a template has no place for them
- `answer_grammar`: grammars of tool calls, and of what follows reasoning
- `grammar_parts`: grammars of several parts
- `input_grammar`: the grammar of a custom tool's text, for the text as it is written within JSON
- `escaped_regex`: the same of an expression
"""

from cadenza.text.bad_words import bad_word_token_ids
from cadenza.text.chat import ChatTemplate
from cadenza.text.detokenizer import DecoderPlan, IncrementalDetokenizer, plan_decoder
from cadenza.text.stop import StopMatch, StopMatcher
from cadenza.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "DecoderPlan",
    "IncrementalDetokenizer",
    "StopMatch",
    "StopMatcher",
    "Tokenizer",
    "bad_word_token_ids",
    "plan_decoder",
]
