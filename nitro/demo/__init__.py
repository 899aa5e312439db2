"""``nitro demo``: a real model on stock vLLM, without and with Nitro, in the same small block pool.

Nothing outside this package depends on it. Importing it imports neither torch nor vLLM.
"""
