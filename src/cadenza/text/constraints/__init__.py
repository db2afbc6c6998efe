"""Which tokens may follow: grammars compiled for one tokenizer.

Modules:

- `compile_threads`: threads that take the cheapest job first, and those of one request in turn
- `token_constraint`: grammars compiled to constraints over a tokenizer's tokens
- `thinking_constraint`: a bound on the tokens of thinking, over a grammar or any text
- `call_constraint`: the constraint of an answer that may be any text with such calls
"""
