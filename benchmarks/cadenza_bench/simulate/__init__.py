"""The engine's own core over steps that only take time.

Modules:

- `traffic`: flags, and the requests
- `device`: what stands in the place of a device; several engines as one
- `run`, `record`: playing the traffic, and the report; what clients see of it
"""
