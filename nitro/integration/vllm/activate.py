"""Put Nitro's scheduler and worker into vLLM's configuration."""

from __future__ import annotations

import functools
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from nitro.config import Settings
from nitro.errors import SettingsError
from nitro.integration.vllm.compat import require_hooks
from nitro.integration.vllm.refusals import require_supported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.plugins.nitro")
KEY = "nitro"
SCHEDULER = "nitro.integration.vllm.scheduler.NitroScheduler"
ASYNC_SCHEDULER = "nitro.integration.vllm.scheduler.NitroAsyncScheduler"
STOCK_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "nitro.integration.vllm.worker_cpu.NitroCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "nitro.integration.vllm.worker.NitroGPUWorker",
}


def is_nitro(target: object) -> bool:
    """Return whether a class, or the dotted path of one, is Nitro's."""
    module = target if isinstance(target, str) else getattr(target, "__module__", "")
    return module.startswith("nitro.")


def settings_in(additional_config: object) -> Settings | None:
    """Return the settings that vLLM's ``additional_config`` carries, or None where Nitro is not asked for.

    Raises:
        SettingsError: they are wrong.
    """
    if not isinstance(additional_config, dict):
        return None
    if additional_config.get(KEY) is None:
        _complain_of_near_misses(additional_config)
        return None
    return Settings.parse(additional_config[KEY])


def _complain_of_near_misses(additional_config: dict[Any, Any]) -> None:
    """Do not let a misspelt or forgotten outer key pass as "Nitro is off".

    Raises:
        SettingsError: a key that looks like ``nitro``; other plugins' keys, and ``"nitro": null``, are left alone.
    """
    for key in additional_config:
        if key != KEY and isinstance(key, str) and get_close_matches(key.lower(), [KEY], cutoff=0.8):
            raise SettingsError(f"unknown key {key!r} in additional_config, did you mean {KEY!r}? Rename or remove it")
    if KEY in additional_config:
        logger.warning_once('additional_config has "%s": null, so Nitro stays off', KEY)
    loose = sorted(set(additional_config) & set(Settings.model_fields))
    if loose and KEY not in additional_config:
        logger.warning(
            'additional_config has %s, but no "%s" object, so Nitro stays off: write {"%s": {...}}',
            ", ".join(loose),
            KEY,
            KEY,
        )


def activate(config: VllmConfig, settings: Settings) -> None:
    """Switch a finished configuration of vLLM to Nitro's scheduler and worker.

    Raises:
        UnsupportedError: Nitro cannot serve this configuration, or does not fit this vLLM.
    """
    require_supported(config, settings)
    require_hooks()
    length = config.model_config.max_model_len
    for name in ("budget", "min_keep"):
        least = getattr(settings, name)
        if least is not None and least + settings.slack > length:
            logger.warning(
                "Nitro will never evict, unless requests ask for less: %s=%d plus slack=%d is more than "
                "max_model_len=%d; lower them",
                name,
                least,
                settings.slack,
                length,
            )
    additional = config.additional_config
    assert isinstance(additional, dict)  # settings_in found the settings in it
    config.additional_config = {**additional, KEY: settings.to_dict()}
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    parallel = config.parallel_config
    parallel.worker_cls = STOCK_WORKERS.get(parallel.worker_cls, parallel.worker_cls)


def wrap_engine_args() -> None:
    """Wrap ``EngineArgs.create_engine_config`` once: settings are checked before, and applied after it.

    A process that makes a configuration may go on to serve requests, so their check is put in place, too. (Not before:
    the plugin is loaded in every worker, where importing vLLM's front-end would take seconds and memory for nothing.)
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "_nitro", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        settings = settings_in(self.additional_config)
        config = original(self, *args, **kwargs)
        if settings is not None:
            activate(config, settings)
        from nitro.integration.vllm.frontend import wrap_front_end

        wrap_front_end()
        return config

    create_engine_config._nitro = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
