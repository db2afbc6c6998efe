"""From a model's name and options to a warm engine: plan, memory, and the engine process's program.

Owns the resolution of every `auto` option. Invariant: no weights are loaded before an `EnginePlan`
exists, and a plan fits the available memory.

Modules:

- `build`: from a model's name and options to a warm engine
- `plan`, `space`, `footprint`: from options to numbers; how memory is divided; what is taken beside
  weights and KV
- `engine_plan`: those numbers, of a model and of those beside it
- `memory`: available memory, below all limits and beside what other engines have reserved
- `machine`: what a machine and an installation are, and what keeps them from more
- `draft`: the plan of a second model, which drafts or scores prompts
- `planned_engine`: a model, its plan and its options; its runners, its cached weights and pages
- `identity`: what decides bits, and which keys have it; the digest of the weights
- `step_costs`: what steps cost, kept from one start to the next
- `engine_program`: what an engine process executes
"""
