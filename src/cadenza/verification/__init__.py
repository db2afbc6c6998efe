"""The gate behind `cadenza verify`: compares batched streams with solo runs and a reference.

Owns the workloads and the verdict. Only `remote_server` uses HTTP. Invariant: the gate passes only
if every comparison was made and every event that a mode is meant to show (preemption, cache hits,
…) occurred.

Modules:

- `run`: from a model to a verdict
- `self_test`: plants faults that the gate must catch, those of a backend among them
- `step_faults`, `image_faults`: faults of what a step says
- `gate`: compares streams
- `workload`, `option_matrix`, `pairwise`: the requests, and the combinations of sampling options
- `forms`: structured outputs for them, and faults of masks
- `modes`: the ways in which they are run
- `image_workload`, `image_modes`: the same with images
- `sparse_workload`: the same with prompts that are thinned out
- `over_http`: the same against a server
- `remote_server`: a client of one server, which sends the requests
- `remote_matrix`: the matrix of options for a server, and what cannot be sent
- `replay`: computes answers again from their receipts
- `remote_replay`: the same at the server that gave them
- `reference`: the reference engine: one request at a time, without batching
"""
