"""Quality at a budget: tasks served by vLLM with Nitro, over policies and budgets, against the full cache."""
