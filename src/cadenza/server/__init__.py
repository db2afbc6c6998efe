"""The HTTP face: an OpenAI-compatible server over any `BatchEngine`.

Owns routes, schemas, streams, auth, limits, logs and metrics. Never sees a page, a Sequence or an
array. Invariant: every accepted request gets exactly one terminal answer, and whatever a client
may send is checked against a bound before anything is allocated for it.

Modules:

- `app`: checks before a handler, and routing
- `routes`: the table of endpoints and routes
- `generation`: from a body to an answer, for every endpoint that calls the engine
- `service`: the server's state
- `served_model`: one model: names, text front end, the engine of each of its loads; its open calls,
  and the order in which their prompts are submitted
- `model_pool`: the models by name, the calls that wait for one, and the tasks that load and unload
- `model_turns`: which models are loaded, and which one makes room for another
- `sse`: bytes of answers and of streamed events
- `errors`: every error answer
- `page`: the HTML of the page at `/docs`
- `dialect`: the shapes of errors and the headers of each API
- `http_exchange`: one HTTP request and its response
- `protocol`: HTTP/1.1 connections and their bounds
- `limits`: bounds, memory for bodies, threads for text, images of calls
- `access`: API keys, CORS, names of the host
- `tenants`: what each tenant may have, and what it has used of its rates
- `listening`: addresses, and listening sockets
- `connections`: accepting connections, within the limit of open files
- `handover`: passing a listening socket to the next server process
- `request_log`: the record of a call: its tokens (`Usage`), times and end; one log line a request
- `metrics`: Prometheus metrics
- `tracing`: spans of calls for an OpenTelemetry collector
- `response_store`: stored responses, within bounds
- `log_output`: log lines written without blocking
- `openapi`: /openapi.json
- `run`: signals, draining, and leaving the address to a successor
"""
