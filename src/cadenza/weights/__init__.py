"""Tensors as they are stored and as they are held: safetensors files, formats, codes and scales.

Modules:

- `tensor_spec`: a tensor, a linear, and what the kinds of layers consist of
- `weight_format`: how the elements of a tensor are held in memory: floats, or integer codes
- `float8_weight`: weights in float8_e4m3fn with scales
- `quantised_weight`: weights as integer codes with scales, and the rounding that makes them
- `block_weight`: weights in the quantised blocks of a file, as it is mapped
- `stored_tensor`, `safetensors_file`, `weights`: memory-mapped tensors, and weights that are stored
  quantised in tensors of other names
- `safetensors_writer`: tensors into files
- `other_folders`: folders of the hub's cache, and of LoRA adapters
- `dtypes`: element types
"""
