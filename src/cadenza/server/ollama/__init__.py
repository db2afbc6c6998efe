"""Ollama's API.

Modules:

- `generate`: /api/chat, /api/generate and /api/embed: bodies, and answers in lines
- `fields`: their fields
- `models`: the models as Ollama lists them, what would change them, and llama.cpp's /props
"""
