"""The operations of a decoder: the op table's interface and its implementations.

Modules:

- `table`: what operations take and return, and the constants of a table
- `reference`, `attention_reference`, `encoder_reference`, `recurrent`, `experts`: their definition
  in plain jnp, of decoders and of image towers
- `quantised`: products with quantised weights, in jnp
- `head_math`, `in_range`: norms and rotations; writes of rows in which every index is in range
- `split`: the operations for devices that share a model
- `program_ops`, `program_mixers`, `program_encoder`, `native_program`: operations recorded as one
  call into a library of kernels
- `native`, `native_library`: the CPU kernels, and measuring with them
- `packed_memory`: packing weights, their memory, and a file of them
- `cuda`, `cuda_library`: the kernels for NVIDIA GPUs
"""
