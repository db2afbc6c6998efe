"""The text front end and the Python interfaces: prompts in, outputs out, around an engine in this
process or another. Invariant: what is streamed is final.

Modules:

- `text_frontend`: from prompts to requests
- `prepared_request`: what a request is made of, as programs give it, and what it becomes
- `sparse_prompts`: which prompts are pruned, and what is kept of them
- `model_prompts`: prompts as texts and ids, conversations by the chat template
- `image_prompts`: images of a prompt: the forms in which they are given, their placeholders
- `receipts`: receipts of finished samples, and the seal of a server's
- `answers`: what an answer to a conversation may consist of, and what it must
- `sampling_defaults`: what a checkpoint says of itself: sampling fields, facts for clients
- `sample_output`: text of one sample: detokenising, stop strings, parts
- `output_processor`: from events to outputs
- `progress`: the progress line of many requests on a terminal
- `loaded_model`: engine and text front end of one checkpoint, its plan, its tokenizer for programs
- `live_steps`: the viewers of a running engine's steps, and what they have seen of late
- `llm`, `async_engine`: the Python interfaces
"""
