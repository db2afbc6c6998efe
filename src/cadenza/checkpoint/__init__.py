"""Opens model folders, GGUF files and models of the hub, and writes folders.

Invariant: nothing from a checkpoint is executed, and anything that cannot be read exactly raises
`CheckpointError`.

Modules:

- `opening`: `open_checkpoint`, of a folder or a GGUF file; what a refused folder contains
- `folder`: an opened model, `Checkpoint`; the reader of folders, those of base models too
- `described_family`: models of unknown types, by a file beside them
- `tokenizer_files`, `generation_defaults`: a folder's tokenizer settings; recommended sampling and
  pooling
- `stacked_experts`: how tensors of all experts become the declared ones
- `tensor_formats`: the format of each tensor; plans, bounds and loading follow
- `mtp_head`: an MTP layer of a model as a model of one layer
- `hub`: folders of the hub's models, and whether a network drops what is sent to it
- `hub_cache`: those in its local cache, found, listed and removed
- `quantised_folder`: the folder that `cadenza quantize` writes
- `random_checkpoint`: random weights of a named or given shape (`shapes/`)
"""
