"""The parts of an answer: reasoning, content and tool calls, parsed and as grammars.

Modules:

- `output_parser`: the protocol of parsers that split a sample's text into parts
- `part_parser`, `harmony`: parsers of answers with marks, and of gpt-oss's messages in channels
- `harmony_grammar`, `answer_grammar`, `answer_frames`: grammars of whole answers
- `content_stops`: stop strings in the content of an answer that has parts
- `tool_calls`, `call_forms`, `call_readers`: notations of calls; where they stand; what is in them
- `argument_schema`: what an argument may be, for notations that write texts as they are
- `call_grammar`, `listed_calls`: grammars of calls in each notation
- `called_tools`: what they are made of
- `generic_tools`: tools as messages, for templates that have no place for them
- `grammar_parts`: grammars of several parts
- `input_grammar`, `escaped_regex`: a custom tool's grammar, for its text as written within JSON
"""
