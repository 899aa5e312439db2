"""Check what requests say about their own eviction in vLLM's front-end, before the engine sees them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError

from nitro.errors import SettingsError
from nitro.integration.vllm.activate import KEY, is_nitro, settings_in
from nitro.integration.vllm.compat import front_end_hooks
from nitro.request_settings import RequestSettings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor


def _unheard() -> None:
    """Count nothing: this process has no ``/metrics``."""


on_refusal: Callable[[], object] = _unheard
"""What is told of each refused request; the metrics of the process put themselves here."""


class RequestSettingsError(SettingsError, VLLMValidationError):
    """A request's settings are wrong: a ValueError in Python, and status 400 in vLLM's HTTP interface."""

    def __init__(self, message: str) -> None:
        """Say what is wrong."""
        super().__init__(message)
        self.parameter = KEY  # HTTP answers have it as "param"

    def __str__(self) -> str:
        """Return the message as it is; vLLM's class adds the parameter."""
        return str(self.args[0])


def check_request(config: VllmConfig, params: object) -> None:
    """Check the settings of one request, and count it if it is refused.

    Args:
        config: of the engine that it is for.
        params: vLLM's sampling (or pooling) parameters.

    Raises:
        RequestSettingsError: they are wrong, or the engine runs without Nitro.
    """
    try:
        _check(config, params)
    except RequestSettingsError:
        on_refusal()
        raise


def _check(config: VllmConfig, params: object) -> None:
    extra = getattr(params, "extra_args", None)
    if not extra:
        return
    active = is_nitro(config.scheduler_config.scheduler_cls)
    asked = extra.get(KEY)
    if asked is None:
        wrong = [key for key in extra if active and key != KEY and str(key).lower() == KEY]
        if wrong:
            raise RequestSettingsError(f"unknown entry {wrong[0]!r}, did you mean {KEY!r}? Rename or remove it")
        return
    server = settings_in(config.additional_config) if active else None
    if server is None:
        raise RequestSettingsError(
            f"the request has an entry {KEY!r}, but this engine runs without Nitro: remove the entry, or start vLLM "
            f"with --additional-config '{{\"{KEY}\": {{...}}}}'"
        )
    try:
        RequestSettings.parse(asked, server)
    except SettingsError as error:
        raise RequestSettingsError(str(error)) from None


def wrap_front_end() -> None:
    """Wrap, once, the methods through which requests come in; in a vLLM where they have changed, none.

    All requests that vLLM makes pass ``InputProcessor.process_inputs``. A server, however, gets there when it has begun
    a streamed answer with status 200; it calls ``AsyncLLM.generate`` before. (Nitro does not start on a vLLM where they
    have changed, see ``compat.require_hooks``; and there this must not break what works without Nitro.)
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    process, generate = InputProcessor.process_inputs, AsyncLLM.generate
    if hasattr(process, "_nitro") or any(hook.fault() for hook in front_end_hooks()):
        return

    @functools.wraps(process)
    def checked_process(
        self: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> EngineCoreRequest:
        check_request(self.vllm_config, params)
        return process(self, request_id, prompt, params, *args, **kwargs)

    @functools.wraps(generate)
    def checked_generate(
        self: AsyncLLM, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        check_request(self.vllm_config, sampling_params)
        return generate(self, prompt, sampling_params, *args, **kwargs)

    checked_process._nitro = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = checked_process
    AsyncLLM.generate = checked_generate
