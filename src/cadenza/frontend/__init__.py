"""The text front end and the Python faces: prompts in, outputs out. Owns tokenising, chat templates
and detokenising around an engine, in this process or another. Never sees a page, a row or an
array. Invariant: what is streamed is final.

Modules:

- `text_frontend`: from prompts to requests
- `prepared_request`: what a request is made of, in the forms in which programs give it, and what it
  becomes
- `sparse_prompts`: which prompts are pruned, and what is kept of them
- `model_prompts`: prompts as texts and ids, conversations by the chat template
- `image_prompts`: images of a prompt: placeholders, and their pixels
- `given_images`: the forms in which programs give images, and what opens them
- `model_tokenizer`: the tokenizer and the chat template for programs
- `receipts`: receipts of finished samples, and the seal of a server's
- `answers`: what an answer to a conversation may consist of, and what it must
- `sampling_defaults`: values of sampling fields that a request leaves unset
- `sample_output`: text of one sample: detokenising, stop strings, parts
- `output_processor`: from events to outputs
- `progress`: the progress line of many requests on a terminal
- `model_facts`: what clients are told of a model besides its name
- `loaded_model`: engine and text front end of one checkpoint, and its plan before anything is
  loaded
- `live_steps`: the viewers of a running engine's steps, and what they have seen of late
- `llm`, `async_engine`: the Python interfaces
"""
