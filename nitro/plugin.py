"""vLLM's entry point to Nitro (group ``vllm.general_plugins``)."""

from __future__ import annotations


def register() -> None:
    """Make ``additional_config={"nitro": {...}}`` switch Nitro on; vLLM calls this in each of its processes.

    Safe to call more than once. Without the ``nitro`` key, vLLM's configuration is returned untouched.
    """
    from nitro.integration.vllm.activate import wrap_engine_args

    wrap_engine_args()
