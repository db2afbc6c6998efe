"""The parts of an answer: reasoning, content and tool calls, parsed and as grammars.

Modules:

- `tool_format`: what a notation of calls is: where they stand, what reads them, their grammar
- `json_calls`, `element_calls`, `listed_calls`: the notations of calls
- `tool_calls`: them all by their names
- `call_forms`: where calls stand in an answer
- `argument_schema`: what an argument may be; JSON as models write it
- `part_parser`, `harmony`: parsers of answers with marks, and of gpt-oss's messages in channels
- `answer_grammar`: grammars of whole answers
- `generic_tools`: tools as messages, for templates that have no place for them
- `input_grammar`: a custom tool's grammar, for its text as written within JSON
"""
