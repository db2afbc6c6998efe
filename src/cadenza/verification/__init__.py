"""The gate behind `cadenza verify`: compares batched streams with solo runs and a reference.

Owns the workloads and the verdict. Only `remote_server` uses HTTP. Invariant: the gate passes only
if every comparison was made and every event that a mode is meant to show (preemption, cache hits,
…) occurred.
"""
