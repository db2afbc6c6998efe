"""JSON Schemas and other notations as grammars, and whether one can be followed.

Modules:

- `json_schema`: JSON Schemas become grammars: bounds, formats, what is left out, which compiler
- `schema_grammar`: our compiler of schemas: soft limits, levels of references
- `json_rules`: JSON in Lark's notation, where blanks may stand, numbers within bounds
- `schema_merge`: schemas as alternatives without `allOf`, `anyOf`, `oneOf` and `$ref`
- `grammar`: structured outputs as grammars, their bounds, and whether they can be followed
- `grammar_worker`: checks grammars, and texts against schemas, in processes that can be killed
- `schema_check`: whether a text is JSON of a schema, for keywords that no grammar holds
"""
