"""JSON Schemas and other forms as grammars, and whether one can be followed.

Modules:

- `json_schema`: JSON Schemas become grammars: their bounds, what is left out, which compiler reads
  one
- `schema_grammar`: the compiler of schemas: blanks, soft limits, lists without repetition, levels
  of what refers to itself
- `lark_rules`: rules and terminals of a grammar, each body once
- `schema_merge`: `allOf`, `anyOf`, `oneOf` and `$ref` with what stands beside them, as alternatives
- `schema_values`: the values of an enum beside bounds, and of schemas that have few
- `schema_numbers`: numbers within bounds as expressions
- `schema_patterns`: formats, and patterns that look around
- `grammar`: structured outputs as grammars, and the bounds of these
- `grammar_check`: whether a grammar can be followed, by a trial over bytes, and what is wrong with
  it
- `grammar_worker`: checks grammars, and texts against schemas, in processes that can be killed
- `schema_check`: whether a text is JSON of a schema, for keywords that no grammar holds
"""
