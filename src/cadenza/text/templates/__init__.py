"""Chat templates: messages to prompt text, within bounds of time and memory.

Modules:

- `chat`: chat templates
- `sandbox`, `bounds`: the limits under which a template runs
- `stable_prompts`: system prompts without the lines that agents change from call to call
- `message_forms`: forms of a conversation for templates that refuse the given one
- `harmony_messages`: the form of a conversation that gpt-oss's template has room for
- `notices`: log lines that are written once
"""
