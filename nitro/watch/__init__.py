"""``nitro stats``: a served engine's figures in the terminal, from its ``/metrics``."""
