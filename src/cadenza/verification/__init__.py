"""The gate behind `cadenza verify`: the same requests alone and together, compared bit for bit, and
the independent reference. Owns the workloads and the verdict. Never sees HTTP but in
`over_http`. Invariant: it passes only if every comparison was made and everything it claims to
show occurred.
"""
