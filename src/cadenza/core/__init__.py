"""Host side of continuous batching. Uses only stdlib and numpy; no clock, threads or I/O.

Modules:

- `sequence`: the mutable state of one stream
- `page_pool`: allocates and frees pages; the order of eviction
- `page_keys`: chained keyed hashes of pages, and which of them are in the cache
- `prefix_cache`: finds pages by their keys, and the sequence that computes shared ones
- `prefix_misses`: why tokens of a prompt were not in the cache, and where a look-up ended
- `recurrent_states`: slots of recurrent states, and snapshots of them after pages of the cache
- `sequence_states`: the recurrent states of sequences: opened, placed, published
- `slot_prefixes`: finds slots whose sequence began alike, where a page is a slot
- `kv_cache_manager`: pages of sequences: sharing, growing, publishing, releasing; `PageStore`
- `image_slots`: where embeddings of images are on the device; eviction
- `image_cost`: predicts the time of encoding, and learns from measured steps
- `image_queue`: which image is encoded next, and how much of it in a step
- `scoring_queue`: which prompts are scored for a sparse prefill, and how much in a step
- `score_memo`: the scores of prompts that were scored lately
- `admission`: whether pages suffice for a sequence to start; what running ones reserve
- `turns`: the order in which sequences are scheduled and preempted; one policy a class
- `fair_share`: which tenant is next, and what those under their share may preempt
- `page_quotas`: how many pages each tenant holds, has in the prefix cache, and may
- `step_cost`: predicts the time of a step, and bounds it
- `step_work`: the protocol of work besides tokens (images, spans, scores, drafts), and of its plan
- `step_budget`: what a step may hold, and how prompts share what decodes leave
- `whole_spans`: bidirectional image blocks: no step ends within one; work items of long ones
- `span_queue`: the block that is computed in work items, and how much of it in a step
- `sequence_list`: sequences in an order, with removal in constant time; the rows of running ones
- `starts`: which waiting sequences start in a step, and why the others wait
- `scheduler`: allocates pages to sequences in order, and makes a batch of them
- `step_results`: applies what a step gave: tokens, drafts that stay, ends
- `batch`: the sequences of a step, their numbers of tokens, and the logits that it needs
- `step_schema`: every per-step field, declared once; uploads and views follow
- `packing`: a `Batch` becomes `ModelInputs`
- `token_rules`: a row's penalties, biases and bans as one record
- `prompt_rows`: positions of a prompt that still need a logit row; embeddings
- `draw_keys`: keys of random draws
- `drafts`: how the sequences of a request draft, and what became of their drafts
- `step_drafts`: which sequences of a step draft; the protocol of drafters
- `draft_plan`: how many drafts each sequence of a step gets, and what they gave
- `draft_costs`: the time of a step with and without drafts, for each number of rows
- `draft_ledger`: what drafts saved and cost at each number of rows; whether they go on
"""
