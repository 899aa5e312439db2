"""Kernels and their PyTorch references, packaged as ``nitro.kernels``: they know neither vLLM nor the rest of Nitro."""
