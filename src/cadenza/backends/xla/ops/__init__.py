"""The operations of a decoder: the op table's interface and its implementations.

Modules:

- `table`: the operations by name
- `encoder_table`, `encoder_reference`, `program_encoder`: those of image towers, as the modules
  of the decoder's
- `reference`, `attention_reference`, `experts`, `head_math`: their definition in plain jnp
- `prompt_scores`: the scores of prompts' keys, in jnp
- `split`: the same for devices that share a model
- `quantised`, `float8`: products with quantised weights and with float8 weights, in jnp
- `kv_codes`: attention over KV in int8, in jnp
- `recurrent`: token mixers with a recurrent state, in jnp
- `jax_arrays`: JAX as the arrays in which tokens are chosen
- `in_range`: writes of some rows, in which every index is in range
- `rules`: token rules, applied to the logits of a step
- `program_ops`, `program_recorder`, `native_program`: operations recorded as one call into a
  library of kernels
- `native`, `native_library`, `native_packing`: the CPU kernels; loading them, packing weights
- `packed_memory`, `packed_file`: memory of packed weights, and a file of them
- `cuda`, `cuda_library`, `cuda_packing`: the kernels for NVIDIA GPUs; loading them and weights
- `cuda_measure`: the rates of a card
- `native_measure`: bandwidth, FLOP/s and time per operation
"""
