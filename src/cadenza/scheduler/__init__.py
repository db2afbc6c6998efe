"""Which sequences a step advances and by how much; images, spans, scores and drafts.

Modules:

- `image_queue`: which image is encoded next, and how much of it in a step
- `scoring_queue`: which prompts are scored for a sparse prefill, and how much in a step
- `scoring`: a prompt that is scored, and the scores of those that were scored lately
- `admission`: whether pages suffice for a sequence to start; what running ones reserve
- `turns`: the order in which sequences are scheduled and preempted; one policy a class
- `fair_share`: which tenant is next, and what those under their share may preempt
- `step_work`: the protocol of work besides tokens (images, spans, scores, drafts), and of its plan
- `step_budget`: what a step may hold, and how prompts share what decodes leave
- `span_queue`: the block that is computed in work items, and how much of it in a step
- `starts`: which waiting sequences start in a step, and why the others wait
- `scheduler`: allocates pages to sequences in order, and makes a batch of them
- `step_results`: applies what a step gave: tokens, drafts that stay, ends
- `step_drafts`: which sequences of a step draft; the protocol of drafters
- `draft_plan`: how many drafts each sequence of a step gets, and what they gave
- `draft_costs`: the time of a step with and without drafts, for each number of rows
"""
