"""Which tokens may follow: grammars compiled for one tokenizer.

Modules:

- `token_constraint`: grammars compiled, on threads, to constraints over a tokenizer's tokens
- `call_constraint`: of any text with calls of a grammar; a bound on the tokens of thinking
"""
