"""Reads GGUF files, llama.cpp's format of one file for configuration, tokenizer and weights.

The metadata and tensors become the entries of a config.json and the declared tensors. Invariant:
nothing is read or allocated by a number of the file before that number was checked.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Modules:

- `reader`: a GGUF file's checked header; the codes and sizes of its types
- `files`: the files of a model, and which file of a folder is meant
- `settings`, `architectures`, `gemma4`, `config`: metadata become a `ModelConfig`
- `latents`: both for attention over latents
- `tensors`, `blocks`: stored tensors under the declared names; quantised types as codes with scales
- `tokenizer`: metadata become a tokenizer.json
- `mmproj`: the image tower of a model, in a file of its own
- `clip_projector`, `projectors`: a projector's type, and what each of them means
- `model`: all of a GGUF model
"""
