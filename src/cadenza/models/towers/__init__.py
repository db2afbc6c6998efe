"""Reads what models that see have beside their text: towers, and the settings of their processors.

Invariant: a `VisionConfig` that was read is complete and within bounds; a setting that would change
pixels or arithmetic and is not supported is refused by name.

Modules:

- `reader`: `TowerReader`, what a family gives, `VisionFiles`, what it is given, settings of image
  processors and of SigLIP towers
- `registry`: the families by model type, and `read_vision`
- `gemma`: Gemma 3 and 4, with a tower and unified
- `idefics3`: Idefics3 and SmolVLM
- `pixtral`: Mistral 3, whose tower is Pixtral's
- `qwen`: Qwen3-VL and Qwen3.5, Qwen2.5-VL and Qwen2-VL
"""
