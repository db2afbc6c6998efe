"""Anthropic's API: messages.

Modules:

- `messages`: /v1/messages: its body, its answer and events
- `blocks`: its content blocks, its tools, and its members that are objects
"""
