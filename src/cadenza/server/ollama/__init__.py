"""Ollama's API.

Modules:

- `generate`: /api/chat and /api/generate: bodies, and answers in lines
- `embed`: /api/embed and /api/embeddings
- `fields`: their fields
- `models`: the models as Ollama lists them, what would change them, and llama.cpp's /props
"""
