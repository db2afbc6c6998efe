"""From a model's name and options to a warm engine: plan, memory, and the engine process's program.

Owns the resolution of every `auto` option. Invariant: no weights are loaded before an `EnginePlan`
exists, and a plan fits the available memory.

Modules:

- `build`: from a model's name and options to a warm engine
- `plan`, `space`, `footprint`: from options to numbers; how memory is divided; what is taken beside
  weights and KV
- `engine_plan`: those numbers, of a model and of those beside it
- `memory`: available memory, below the limits of control groups and of the process
- `reserved_memory`: memory that other engines have reserved and not taken yet
- `draft`: the plan of a second model, which drafts or scores prompts
- `sparse_gain`: the predicted gain in time to the first token of a pruned prompt
- `planned_engine`: a model, its plan and its options, and how its runners are loaded
- `identity`, `content_digest`: what decides bits, and which keys have it; the digest of the weights
- `page_folder`: the folder of `--prefix-cache-disk`
- `weight_cache`: where weights that `--quantization` makes are kept, and how many bytes of them
- `step_costs`: what steps cost, kept from one start to the next
- `engine_program`: what an engine process executes
- `image_memory`: what images take
- `memory_shares`: how memory is divided among engines that run side by side
"""
