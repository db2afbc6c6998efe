"""Several engines that serve one model as one: streams move between them, bit for bit.

Modules:

- `engine_group`: `EngineGroup`, a `BatchEngine` over replicas
- `group_stats`: the replicas' figures, and summaries of steps, as those of one engine
- `router`: the replica of each request, by what each holds and does
- `scale_policy`: how many engines a load needs
- `engine_host`, `shared_engine`: an engine process for front ends on other machines
- `remote_engine`: such a process, as a front end sees its child; which host it uses; how both ends
  prove that they know one secret
- `cores`: the CPUs of each replica
"""
