"""Calls of the engine, of whatever API: what `generation` needs of an endpoint, and what endpoints
share. Invariant: an endpoint is a module of its own and a line in `routes`; nothing compares its
name.

Modules:

- `request`: what an endpoint says of itself, and a checked body of its prompts and parameters
- `conversation`: what all APIs make of a conversation
- `encoder`: bytes of answers and of streamed events
- `record`: the record of a call: its tokens (`Usage`), times and end; one log line a request
"""
