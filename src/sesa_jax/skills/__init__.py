"""The memory: skill cards, the bank that keeps them, and the rules by which they enter, are found and leave.

Read in this order: `card` (what a card is), `encoder` (which cards fit a question), `consolidate` (the rules), `bank`
(the API), `state`, `lineage` and `log` (what is behind it). `distill` writes cards from failures, `priming` has the
first ones. Nothing here imports JAX.
"""
