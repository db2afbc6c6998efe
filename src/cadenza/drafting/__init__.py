"""Where drafts come from, and what they saved and cost.

Modules:

- `drafts`: how the sequences of a request draft, and what became of their drafts
- `draft_ledger`: what drafts saved and cost at each number of rows; whether they go on
"""
