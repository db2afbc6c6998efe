"""What an answer consists of: reasoning, content and tool calls, parsed and as grammars.

Modules:

- `output_parser`: the protocol of parsers that split a sample's text into parts (content,
  reasoning, calls)
- `part_parser`: the parser of reasoning and tool calls between marks
- `harmony`: the parser of answers that are messages in channels, as gpt-oss writes them
- `harmony_grammar`: grammars of such answers
- `answer_frames`: what stands around content and calls in a whole answer, in either form
- `content_stops`: stop strings in the content of an answer that has parts
- `tool_calls`: the notations of tool calls by family
- `call_forms`: where calls begin and end in an answer
- `call_readers`: what is in them, as leniently as is certain
- `argument_schema`: what an argument may be, for notations that write texts as they are
- `call_grammar`: what a call may be that the model begins by itself, in each notation
- `called_tools`: what the grammars of calls are made of
- `element_calls`, `listed_calls`: grammars of calls with elements, and with arguments in a list
- `gemma_values`: arguments of calls as Gemma 4 writes them
- `generic_tools`: tools and their results as messages, where a template has no place for them
- `written_calls`: calls and tools as texts of messages, where a template passes over them
- `answer_grammar`: grammars of tool calls, and of what follows reasoning
- `grammar_parts`: grammars of several parts
- `input_grammar`: the grammar of a custom tool's text, for the text as it is written within JSON
- `escaped_regex`: the same of an expression
"""
