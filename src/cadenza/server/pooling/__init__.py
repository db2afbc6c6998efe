"""Endpoints that generate nothing: prompts become embeddings and scores.

Modules:

- `embeddings`: /v1/embeddings, and what all that embed share
- `rerank`: /v1/rerank: its body and its answer
"""
