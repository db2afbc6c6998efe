"""What a server tells of itself and of its model, without an answer: health, traces, logs, pages.

Modules:

- `status`: health, models, cancel, metrics, version
- `batch_stream`: /debug/batch and /debug/batch/stream: the engine's steps, once and while somebody
  looks
- `tokens`: /tokenize, /detokenize and the counts of messages
- `replay`: /v1/receipts/replay: its body and its answer
- `pages`: `/` and `/docs`, and the page's files
- `tracing`: spans of calls for an OpenTelemetry collector
- `log_output`: log lines written without blocking
"""
