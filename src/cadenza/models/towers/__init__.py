"""Reads what models that see have beside their text: towers, and the settings of their processors.

Invariant: a `VisionConfig` that was read is complete and within bounds; a setting that would change
pixels or arithmetic and is not supported is refused by name.

Modules:

- `reader`: `TowerReader`, what a family gives, `VisionFiles`, what it is given, and the settings of
  image processors
- `registry`: the families by model type, and `read_vision`
- `siglip`: settings that SigLIP towers share
- `idefics3`: Idefics3 and SmolVLM
- `gemma3`: Gemma 3
- `gemma4`: Gemma 4, with a tower and unified
- `pixtral`: Mistral 3, whose tower is Pixtral's
- `qwen`: Qwen3-VL and Qwen3.5, Qwen2.5-VL and Qwen2-VL
"""
