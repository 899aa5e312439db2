"""``nitro bench``: stock vLLM and Nitro side by side, and where the difference comes from (docs/bench.md).

Importing it imports neither torch nor vLLM: engines run in processes of their own.
"""
