"""The endpoints: bodies, handlers, answers and routes, in one module for each endpoint or kind.

Invariant: an endpoint is added by a module of its own and a line in `routes`; nothing compares an
endpoint's name.

Modules:

- `chat`, `completions`: body, prompts, choices and route of each
- `embeddings`: /v1/embeddings: its body and its answer
- `rerank`: /v1/rerank: its body and its answer
- `conversation`: what all APIs make of a conversation
- `blocks`: reasoning, texts and calls of an answer, for APIs whose answers are lists of these
- `responses`, `response_answer`, `stored_responses`: /v1/responses: its body, its answer and
  events, and the routes of stored ones
- `messages`: /v1/messages: its body, its answer and events
- `ollama`, `ollama_embed`: /api/chat, /api/generate and /api/embed: bodies, and answers in lines
- `ollama_models`: the models as Ollama lists them, what would change them, and llama.cpp's /props
- `replay`: /v1/receipts/replay: its body and its answer
- `generating`: their interface to `generation`
- `tokens`: /tokenize, /detokenize and the counts of messages
- `root`: `/` and `/docs`
- `ui`: the files of the page at `/`
- `status`: routes that do not generate
- `batch_stream`: /debug/batch and /debug/batch/stream: the engine's steps, once and while somebody
  looks
"""
