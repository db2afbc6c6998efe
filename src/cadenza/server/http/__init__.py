"""HTTP/1.1: sockets, connections, requests.

Modules:

- `exchange`: one HTTP request and its response, in the dialect of its API
- `protocol`: connections and their bounds
- `listening`: addresses, listening sockets, and accepting connections within the limit of open
  files
"""
