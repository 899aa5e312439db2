"""The only place where Nitro touches vLLM (running whole engines in the demo and the tests apart)."""
