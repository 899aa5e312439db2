"""How many requests a card holds, with and without Nitro, by arithmetic alone: neither torch nor vLLM is imported.

``docs/plan.md`` has the formulas, says which are vLLM's and which are guesses, and compares them with measurements.
"""

from __future__ import annotations
