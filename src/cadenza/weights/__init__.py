"""Tensors as they are stored and as they are held: safetensors files, formats, codes and scales.

Modules:

- `weight_format`: types of elements, and how they are held in memory: floats, or integer codes
- `tensor_spec`: a tensor, a linear, and what the kinds of layers consist of
- `quantised_weight`: weights as integer codes, float8 or blocks of a file, with scales
- `stored_tensor`, `safetensors_file`: memory-mapped tensors, and their files, read and written
- `weights`: the tensors of a folder by name
"""
