"""The engine in a process of its own, and messages between it and the front end.

Modules:

- `process_link`: the `EngineLink` to another process, which it starts, watches and replaces
- `supervision`: the process's state: hung, crashed, when to restart
- `recovery`: which requests a restarted process goes on with, and when
- `launch`: starts the process, before its front end has loaded anything; its garbage collections
- `child_process`: the front end's handle on the process
- `frame_socket`: messages over a socket that never blocks; what other threads leave to be sent
- `messages`: the protocol between the processes, and log records as lines
- `worker`: the engine process's program: runs `run_steps`, and predicts the time of a step
"""
