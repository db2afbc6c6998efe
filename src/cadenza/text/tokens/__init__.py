"""Tokens and text: encoding, control tokens, incremental decoding, stop strings.

Modules:

- `tokenizer`: encoding and decoding with a tokenizer.json; refuses texts that cannot fit; bad words
- `control_tokens`: tokens that user text must not produce
- `provenance`: which characters of a rendering come from the template
- `detokenizer`: text from a stream of tokens
- `decoder_stages`: the steps of a tokenizer's decoder, made incremental
- `stop`: stop strings in text that comes in pieces
"""
