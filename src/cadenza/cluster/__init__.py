"""Several engines that serve one model as one: streams move between them, bit for bit.

Modules:

- `engine_group`: `EngineGroup`, a `BatchEngine` over replicas
- `group_stats`: the replicas' states and figures as those of one engine
- `live_rows`: summaries of the replicas' steps as those of one engine
- `route_choice`: which replica a request goes to
- `scale_policy`: how many engines a load needs
- `router`: chooses the replica of each request, by reports and by what was sent
- `prefix_view`: what a replica holds of prompts
- `engine_host`: `EngineHost`, which runs an engine process for front ends on other machines
- `shared_engine`: `SharedEngine`, one engine process that several front ends use
- `fronts`: what these share: settings that agree
- `remote_engine`: such a process, as a front end sees its child
- `host_book`: which host each place of a front end uses
- `handshake`: how both ends prove that they know one secret
- `cores`: the CPUs of each replica
"""
