"""The verifier behind `cadenza verify`: compares batched streams with solo runs and a reference.

Invariant: it passes only if every comparison was made and every event that a mode is meant to show
(preemption, cache hits, …) occurred. Only `remote_server` uses HTTP.

Modules:

- `run`: from a model to a verdict
- `self_test`, `faults`: faults that the verifier must catch
- `verifier`: plays the modes and gives the verdict
- `differences`: compares two streams
- `workload`: the requests
- `option_matrix`: the combinations of sampling options, and structured outputs
- `modes`, `play`: the ways in which they are run
- `over_http`, `remote_server`: the same against a server, through its client
- `replay`: computes answers again from their receipts, here or at a server
- `reference`: the reference engine: one request at a time, without batching
"""
