"""Image towers on the op table: patches become rows of the text model's width, in quanta.

Every quantum computes a block of rows of one stage of one layer, so its time is bounded; blocks
begin at multiples of their size from an image's first row, whatever is computed beside them.
Invariant: an embedding is a function of an image's pixels, the processor's settings and weights.

Modules:

- `tower_weights`: loads the tensors of a tower in the layouts of an op table
- `stages`: what a quantum of each stage computes, and the device memory in which it does
- `encoder`: `ImageEncoder`, compiled stages run over that memory, and the host's tables of patches
"""
