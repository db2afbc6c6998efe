"""The server's process, from its start to its end.

Modules:

- `run`: signals, draining, and leaving the address to a successor
- `handover`: passing a listening socket to the next server process
"""
