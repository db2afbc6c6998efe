"""Request bodies, each declared once: what is checked and what `/openapi.json` says follow from it.

Knows no endpoint and no HTTP. Invariant: every value is used, or has no effect by its meaning, or
is refused by name; a value that would change an answer is never ignored.

Modules:

- `body`: request bodies, whose members are declared once, checked and described
- `field_types`: types of members
- `json_text`: the JSON of a body, or the place at which it is none
- `unknown_members`: what becomes of members that nothing declares
- `other_engines`: the table of other engines' fields that change an answer
- `generation`: the members that all generating endpoints share
- `prompts`: texts and token ids, one or several
- `messages`: chat messages
- `text_parts`: a text, or a list of parts that hold texts
- `items`: input items of responses, and the messages that they stand for
- `response_tools`: tools that are no functions as functions: namespaces, and custom tools
- `responses`: other fields of responses that are objects
- `content_blocks`: blocks of /v1/messages, and the messages that they stand for
- `message_fields`: other fields of /v1/messages that are objects
- `ollama`: fields of Ollama's bodies
- `structured`: fields that ask for a form of the answer
- `reasoning`: efforts and bounds of reasoning
- `thinking`: the switches of thinking that other servers have
- `tools`: tools, and the choice among them
"""
