"""The text front end and the Python faces: prompts in, outputs out. Owns tokenising, chat templates
and detokenising around an engine, in this process or another. Never sees a page, a row or an
array. Invariant: what is streamed is final.
"""
