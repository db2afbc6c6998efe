"""The HTTP face: a server of several APIs over any `BatchEngine`. Never sees a page, a Sequence or
an array. Invariant: every accepted request gets exactly one terminal answer, and whatever a client
may send is checked against a bound before anything is allocated for it.

`openai`, `anthropic`, `ollama` and `pooling` each have an API: bodies, encoders, endpoints; what
they share is in `fields` (of bodies) and `calls`. `http` has sockets and connections, `lifecycle`
the process, `operations` what a server tells of itself.

Modules:

- `app`: checks before a handler, and routing
- `routes`: the table of endpoints and routes
- `service`: the server's state
- `generation`: from a body to an answer, for every endpoint that calls the engine
- `served_model`: one model: names, text front end, the engine of each of its loads; its open calls,
  and the order in which their prompts are submitted
- `model_pool`: the models by name, the calls that wait for one, and the tasks that load and unload
- `model_turns`: which models are loaded, and which one makes room for another
- `response_store`: stored responses, within bounds
- `metrics`: Prometheus metrics
- `errors`: every error answer
- `limits`: bounds, memory for bodies, threads for text, images of calls
- `access`: API keys, CORS, names of the host
- `tenants`: what each tenant may have, and what it has used of its rates
- `openapi`: /openapi.json
"""
