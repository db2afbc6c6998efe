"""Calls of the engine, of whatever API: what `generation` needs of an endpoint, and what endpoints
share. Invariant: an endpoint is a module of its own and a line in `routes`; nothing compares its
name.

Modules:

- `endpoint`: what an endpoint says of itself, a checked body of its prompts and parameters, and the
  bytes of its answers and streamed events
- `conversation`: what all APIs make of a conversation
- `record`: the record of a call: its tokens (`Usage`), times and end; one log line a request
"""
