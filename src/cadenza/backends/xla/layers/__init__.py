"""What a decoder layer is made of: kinds, each with its weights, loading and arithmetic.

A layer is a token mixer, which reads earlier tokens, and a feed-forward, which does not. A new kind
is a class here and its line in `decoder.MIXERS` or `decoder.FEED_FORWARDS`.

Modules:

- `weight_source`: the tensors of a checkpoint, loaded in the op table's layouts
- `residual`: the residual stream, and what the layers of a step compute with
- `attention`: the token mixers over KV pages, of keys and values or of latents
- `recurrent`: the token mixers with a recurrent state
- `feed_forward`: a gated MLP, a mixture of them, and both
- `layer_inputs`: per-layer embeddings, and an MTP layer's input
"""
