"""Request bodies, each declared once: what is checked and what `/openapi.json` says follow from it.

Knows no endpoint and no HTTP. Invariant: a value is used, or it asks for nothing, or it is refused
by name; what would change an answer is never dropped.
"""
