"""OpenAI's API: completions, chat completions, responses.

Modules:

- `chat`, `completions`: body, prompts, choices and route of each
- `choices`: what both share
- `responses`: the body of /v1/responses
- `response_items`: its input items, its tools, and its members that are objects
- `response_answer`: its answer and events, and the routes of stored ones
"""
