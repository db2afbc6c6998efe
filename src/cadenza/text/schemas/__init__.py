"""JSON Schemas and other notations as grammars, and whether one can be followed.

Modules:

- `json_schema`: JSON Schemas become grammars: bounds, formats, what is left out, which compiler
- `schema_grammar`: our compiler of schemas: blanks, soft limits, levels of references
- `lark_rules`: rules and terminals of a grammar, each body once
- `schema_merge`: `allOf`, `anyOf`, `oneOf` and `$ref` with what stands beside them, as alternatives
- `schema_values`: the values of an enum beside bounds, and of schemas that have few
- `schema_numbers`: numbers within bounds as expressions
- `grammar`: structured outputs as grammars, and the bounds of these
- `grammar_check`: whether a grammar can be followed, and what is wrong with it
- `grammar_worker`: checks grammars, and texts against schemas, in processes that can be killed
- `schema_check`: whether a text is JSON of a schema, for keywords that no grammar holds
"""
