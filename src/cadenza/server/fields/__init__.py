"""Bodies and the fields that several APIs have, each declared once: what is checked and what
`/openapi.json` says follow from it. Invariant: every value is used, or has no effect by its
meaning, or is refused by name; a value that would change an answer is never ignored.

Modules:

- `body`: request bodies, whose members are declared once, checked and described, and what becomes
  of members that nothing declares
- `types`: the JSON of a body, and types of members
- `other_engines`: the table of other engines' fields that change an answer
- `sampling`: prompts, and the members that all generating endpoints share
- `messages`: chat messages
- `images`: images in messages
- `structured`: fields that ask for a form of the answer
- `thinking`: fields that turn reasoning on and off and bound it
- `tools`: tools of all APIs, and the choice among them
"""
