"""HTTP/1.1: sockets, connections, requests.

Modules:

- `exchange`: one HTTP request and its response
- `protocol`: connections and their bounds
- `listening`: addresses, and listening sockets
- `connections`: accepting connections, within the limit of open files
"""
