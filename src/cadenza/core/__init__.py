"""Host side of continuous batching. Uses only stdlib and numpy; no clock, threads or I/O.

Modules:

- `sequence`: the mutable state of one stream
- `page_pool`: allocates and frees pages; which one of the prefix cache is reused first
- `page_keys`: chained keyed hashes of pages, and which of them are in the cache
- `prefix_cache`: finds pages by their keys; which running sequence computes one that others share
- `prefix_misses`: why tokens of a prompt were not found in the cache, and where a look-up ended
- `recurrent_states`: slots of recurrent states, and snapshots of them behind pages of the cache
- `sequence_states`: the recurrent states of sequences: opened, placed, published
- `slot_prefixes`: finds slots whose sequence began alike, where a page is a slot
- `kv_cache_manager`: pages of sequences: sharing, growing, publishing, releasing; the protocol of
  what keeps pages beyond the pool
- `image_slots`: where the embeddings of images are on the device, and which may be given up
- `image_cost`: predicts the time of encoding, and learns from measured steps
- `image_queue`: which image is encoded next and how much of it in a step; what waits for images
- `scoring_queue`: which prompts a scorer reads for a sparse prefill, and how much of them in a step
- `score_memo`: the scores of prompts that were scored lately
- `admission`: whether a sequence may start; what running ones reserve, summed once a step
- `turns`: who goes next and who makes room: the waiting sequences, and one policy a class
- `fair_share`: whose turn it is among tenants, and what those under their share may preempt
- `page_quotas`: how many pages each tenant holds and has in the prefix cache, and may
- `step_cost`: predicts the time of a step, and bounds it
- `step_work`: the protocol of what steps do beside tokens (images, spans, scores, drafts), the plan
  of one step, and what steps are to take
- `step_budget`: what a step may hold, and how prompts share what decodes leave of it
- `whole_spans`: tokens that attend to each other both ways, within which no step ends, and the
  quanta of those that take longer than a step may
- `span_queue`: the span that is computed in quanta, and how much of it in a step
- `sequence_list`: waiting or running sequences in an order, from which any one leaves without a
  search; the rows of those that run
- `starts`: which waiting sequences start in a step, and why the others wait
- `scheduler`: allocates pages to whose turn it is, and makes a batch of them
- `step_results`: applies what a step gave: tokens, drafts that stay, ends
- `batch`: the sequences of a step, their numbers of tokens, and the logits that it needs
- `step_schema`: every per-step field, declared once; the upload, the views on the host and the
  device's arrays follow
- `packing`: a `Batch` becomes `ModelInputs`
- `token_rules`: a row's penalties, biases and bans as one record; which fields of a request rule
  tokens out
- `prompt_rows`: which positions of a prompt still need a logit row; hidden states as an embedding
- `draw_keys`: keys of random draws
- `drafts`: how the sequences of a request draft, their own source, and what became of their drafts
- `step_drafts`: which sequences of a step draft, and the protocol of what drafts for them
- `draft_plan`: how many drafts each sequence of a step gets, and what they gave
- `draft_costs`: what a step takes without drafts and what so many add, learned for each number of
  rows
- `draft_ledger`: what drafts have saved and cost at each number of rows, and whether they go on
"""
