"""What a step computes: sequences, the batch of them, and the arrays that it becomes.

Modules:

- `sequence`: the mutable state of one stream; sequences in an order, and the rows of running ones
- `image_cost`: predicts the time of encoding, and learns from measured steps
- `step_cost`: predicts the time of a step, and bounds it
- `whole_spans`: bidirectional image blocks: no step ends within one; work items of long ones
- `batch`: the sequences of a step, their numbers of tokens, and the logits that it needs
- `step_schema`: every per-step field, declared once; uploads and views follow
- `packing`: a `Batch` becomes `ModelInputs`
- `token_rules`: a row's penalties, biases and bans as one record
- `prompt`: which tokens of a prompt are computed, its spans, its logit rows; embeddings
- `draw_keys`: keys of random draws
- `recurrent_state`: the state slots of one sequence, and the snapshots that it wants
"""
