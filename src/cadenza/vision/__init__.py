"""Models that see: what their towers are, and how an image becomes a tower's input.

Pure functions of numbers and pixels; knows no devices, requests or files. Invariant: the parts and
tokens of an image follow from its size alone, before any pixel is decoded.

Modules:

- `tower_config`: `VisionConfig`, everything that the arithmetic of a tower depends on
- `quanta`: the quanta of an image's encoding, the operations of each, and the memory that they take
- `processor`: `ImageProcessor`, sizes, placeholders, pixels and patches of one family of models;
  resizing
- `patches`: from pixels to patches, and the order of a tower's rows
- `idefics3`: the processor of Idefics3 and SmolVLM
- `whole_images`: the processors of Gemma, Pixtral, Mistral 3 and Qwen, which encode an image whole
"""
