"""Several engines that serve one model as one: streams move between them, bit for bit.

Modules:

- `engine_group`: `EngineGroup`, a `BatchEngine` over replicas
- `group_stats`, `live_rows`: the replicas' figures, and summaries of steps, as those of one engine
- `router`, `route_choice`, `prefix_view`: the replica of each request, by what each holds and does
- `scale_policy`: how many engines a load needs
- `engine_host`, `shared_engine`: an engine process for front ends on other machines
- `fronts`: what these share: settings that agree
- `remote_engine`, `host_book`: such a process, as a front end sees its child; which host it uses
- `handshake`: how both ends prove that they know one secret
- `cores`: the CPUs of each replica
"""
