"""Request bodies, each declared once: what is checked and what `/openapi.json` says follow from it.

Knows no endpoint and no HTTP. Invariant: every value is used, or has no effect by its meaning, or
is refused by name; a value that would change an answer is never ignored.
"""
