"""The engine in a process of its own, and messages between it and the front end.

Modules:

- `process_link`: the `EngineLink` to another process, which it starts, watches and replaces
- `supervision`: the process's state: hung, crashed, when to restart
- `outbox`: what other threads leave for the thread that serves the process
- `recovery`: which requests a restarted process goes on with, and when
- `launch`: starts the process, before its front end has loaded anything
- `child_process`: the process handle
- `frame_socket`: messages over a socket that never blocks
- `messages`: the protocol between the processes, and log records as lines
- `child`: the engine process's program
- `worker`: runs `run_steps` there, and predicts the time of a step
- `heap`: leaves what a process has loaded out of garbage collections
"""
