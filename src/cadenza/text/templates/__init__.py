"""Chat templates: messages to prompt text, within bounds of time and memory.

Modules:

- `chat`: chat templates
- `sandbox`, `bounds`: the limits under which a template runs
- `message_forms`: forms of a conversation for templates that refuse the given one, and without the
  lines that agents change from call to call
- `notices`: log lines that are written once
"""
