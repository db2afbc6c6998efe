"""The HTTP face: an OpenAI-compatible server over any `BatchEngine`.

Owns routes, schemas, streams, auth, limits, logs and metrics. Never sees a page, a Sequence or an
array. Invariant: every accepted request gets exactly one terminal answer, and whatever a client
may send is checked against a bound before anything is allocated for it.
"""
