"""Opens model folders, GGUF files and models of the hub, and writes folders.

Invariant: nothing from a checkpoint is executed, and anything that cannot be read exactly raises
`CheckpointError`.

Modules:

- `tensor_formats`: the format of each tensor; plans, bounds and loading follow. Beside int4 the
  first layer has 8 bits: its error passes through all others, and calibrating the rest instead
  would need text and minutes, and codes that depend on the machine
- `quantised_folder`: the folder that `cadenza quantize` writes
- `new_folder`: a folder that is written whole, with another's small files
- `described_family`: models of unknown types, by a file beside them
- `mtp_head`: an MTP layer of a model as a model of one layer
- `stacked_experts`: how names, and tensors of all experts, become the declared ones
- `opening`: `open_checkpoint`, of a folder or a GGUF file
- `folder`: an opened model, `Checkpoint`; the reader of folders, those of base models too
- `hub`: folders of the hub's models, and whether a network drops what is sent to it
- `hub_cache`: those in its local cache, listed and removed
- `survey`: what a refused folder contains, for its error message
- `tokenizer_files`, `generation_defaults`, `pooling_files`: a folder's tokenizer settings,
  recommended sampling and pooling
- `random_checkpoint`: random weights of a named or given shape (`shapes/`)
"""
