"""What a model is: its configuration, families, towers and tensors. `bundled` and its
siblings are the models that ship.

Modules:

- `model_config`: `ModelConfig`, everything that the arithmetic of a model depends on
- `layer_kind`: `LayerKind`, the heads or the recurrence of a layer, and groups of equal KV
- `config_json`: strict reading of config.json; `ModelOutline`, what is known of a model whose
  arithmetic a backend brings
- `rope_config`, `rope_factors`: rotary settings, and their cosines and sines
- `host_math`: logarithms, powers, cosines and sines with the same bits on every machine
- `declaration`: every tensor, declared once; loading and random weights follow
- `operations`: what a token costs by a shape alone
- `tower_spec`: the tensors of an image tower (`towers/` reads the settings of models that see)
- `wrapped_text`: the text model of a checkpoint that has towers for images or sound
- `score_head`: the head of models that score a text
- `split`: the part of each of several devices that share a model
- `mtp_layout`: how the MTP layers of each family are stored and fed
"""
