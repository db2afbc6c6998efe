"""`EngineCore`, its step loop, and the thread-safe `BatchEngine` over it, in this process or in
another. Owns the open requests, their deadlines, and recovery from failed steps. Knows no text,
HTTP or checkpoint. Invariant: an accepted request ends exactly once, even if the engine crashes.

Modules:

- `core`: `EngineCore`: submit, step, cancel
- `request_check`: refuses requests that can never be served
- `new_sequences`: makes the sequences of a request, once its constraint is compiled
- `model_drafter`: drafts of a second model, which draws them as the target would
- `scoring_steps`: the steps of the model that scores prompts
- `loop`: launching and reading steps, and failed steps
- `calibration`: times a runner's steps before an engine serves
- `batch_engine`: the thread-safe interface (`BatchEngine`), its state, `run_steps`, the one loop
- `front`: `EngineFront`, which implements it over a link to an engine, and the link in one process
- `open_requests`, `request_stats`: the open requests, queue bounds, deadlines; what became of them
- `timeouts`: how long a request may wait and take, and when one that comes now would start
- `stored_pages`: pages of prompts between the device and a folder, and who waits for them
- `page_traffic`: the thread that reads and writes pages
- `page_folder`: pages as files that several engines share
- `request_ids`: ids of requests, by front end
- `route_report`: what an engine tells those who choose among several; how long its prompts take
- `stats`: counters
- `step_works`: makes what the steps of an engine do beside tokens
- `step_watch`: summaries of the steps for viewers, while there are any
"""
