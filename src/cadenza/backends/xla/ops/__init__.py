"""The operations of a decoder: the op table's interface and its implementations.

Modules:

- `table`: the operations by name
- `reference`, `experts`, `head_math`: their definition in plain jnp
- `quantised`, `float8`: products with quantised weights and with float8 weights, in jnp
- `kv_codes`: attention over KV in int8, in jnp
- `recurrent`: token mixers with a recurrent state, in jnp
- `jax_arrays`: JAX as the arrays in which tokens are chosen
- `rules`: token rules, applied to the logits of a step
- `native`, `native_program`: the operations over the CPU kernels; a step's operations recorded as
  one call into the library
- `native_library`, `native_packing`, `packed_memory`, `packed_file`: loading the kernels; packing
  weights; memory of packed weights, and a file of them
- `native_measure`: bandwidth, FLOP/s and time per operation
"""
