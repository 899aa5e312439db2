"""Which budget rule each request of a scheduler has."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from nitro.integration.vllm.activate import KEY
from nitro.planner import Rule, rule_for, rule_of
from nitro.request_settings import RequestSettings

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from nitro.config import Settings

logger = init_logger("vllm.plugins.nitro")
_REMEMBERED = 1024  # clients choose what is asked, so there may be any number of rules


class RequestRules:
    """The server's rule for requests that say nothing, and for others the rule that they ask for."""

    def __init__(self, settings: Settings) -> None:
        """Begin with the server's settings."""
        self.default = rule_of(settings)
        self._settings = settings
        self._parsed = lru_cache(_REMEMBERED)(self._parse)
        self._warned = False

    def of(self, request: Request) -> Rule:
        """Return a request's rule. It changes only if the request's sampling parameters do.

        vLLM's front-end has refused what is wrong. A request that came past it, in whatever shape, must not end the
        engine and with it all other requests: it has the server's rule then.
        """
        params = request.sampling_params
        extra = None if params is None else params.extra_args
        if not extra or (asked := extra.get(KEY)) is None:
            return self.default
        try:
            return self._parsed(asked if isinstance(asked, str) else tuple(asked.items()))
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "request %s is served with the server's settings, and so are others like it, of which nothing more "
                    "is said: %s",
                    request.request_id,
                    error,
                )
            return self.default

    def _parse(self, asked: str | tuple[tuple[str, Any], ...]) -> Rule:
        own = RequestSettings.parse(asked if isinstance(asked, str) else dict(asked), self._settings)
        return rule_for(self.default, own)
