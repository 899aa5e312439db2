"""What one request may say for itself: the ``"nitro"`` entry of vLLM's ``SamplingParams.extra_args``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError

from nitro._settings_text import REQUEST_RULES, explain, kind_of, report, show
from nitro._suggest import nearest
from nitro.config import STRICT, Budget, Ratio, Settings, Slack, contradictions
from nitro.errors import SettingsError

ABOUT = "nitro settings of a request"
# Of what a client sends; more would only take time, in which others wait, and memory, since rules are remembered by it.
MOST_CHARACTERS, MOST_KEYS = 4096, 64
SERVER_ONLY = tuple(name for name in Settings.model_fields if name not in REQUEST_RULES)


class RequestSettings(BaseModel):
    """What a request sets; what it leaves out, or sets to None, is as in the server's settings."""

    model_config = STRICT

    enabled: bool = Field(True, description="If false, this request is never evicted, whatever else it sets.")
    budget: Budget | None = Field(None, description="In place of the server's `budget`, `ratio` or `threshold`.")
    ratio: Ratio | None = Field(None, description="In place of the server's `budget`, `ratio` or `threshold`.")
    slack: Slack | None = Field(None, description="In place of the server's `slack`.")
    evict_prompt: bool | None = Field(None, description="In place of the server's `evict_prompt`.")

    @classmethod
    def parse(cls, obj: object, server: Settings) -> Self:
        """Check what a client wrote.

        Args:
            obj: a mapping, or a string with a JSON object: vLLM's HTTP interface lets no nested objects through.
            server: the settings of the engine that the request is for.

        Raises:
            SettingsError: with every problem found, each naming the key, the value, the bound and the remedy.
        """
        values = _object(obj)
        fixed = [name for name in SERVER_ONLY if name in values]
        problems = [
            f"{name}={show(values[name])} cannot be set by a request: the evictions of a step are scored together, "
            f"with the server's {', '.join(SERVER_ONLY)}; remove it, or set it in the server's --additional-config"
            for name in fixed
        ]
        own = {name: value for name, value in values.items() if name not in fixed}
        doubtful: set[str | None] = set()
        try:
            settings = cls.model_validate(own)
        except ValidationError as error:
            details = error.errors(include_url=False)
            problems += [explain(detail, REQUEST_RULES) for detail in details]
            doubtful = {nearest(str(detail["loc"][0]), REQUEST_RULES) for detail in details if detail["loc"]}
        sound = {n: own[n] for n in ("budget", "ratio") if n not in doubtful and own.get(n) is not None}
        problems += contradictions(
            {**sound, "sinks": server.sinks, "window": server.window}, otherwise=" (sinks and window are the server's)"
        )
        if problems:
            raise SettingsError(report(problems, ABOUT))
        return settings


def _object(obj: object) -> Mapping[Any, Any]:
    value = obj
    if isinstance(obj, str):
        if len(obj) > MOST_CHARACTERS:
            raise SettingsError(f"{ABOUT} have {len(obj)} characters, may have {MOST_CHARACTERS}: shorten the string")
        try:
            value = json.loads(obj)
        except (ValueError, RecursionError) as error:
            raise SettingsError(
                f'{ABOUT} must be a JSON object, e.g. {{"budget": 512}}; got {show(obj)}, which is not JSON: {error}'
            ) from None
    if not isinstance(value, Mapping):
        raise SettingsError(
            f'{ABOUT} must be an object, e.g. {{"budget": 512}}, or a string with one in JSON; '
            f"got {show(obj)}, {kind_of(value)}"
        )
    if len(value) > MOST_KEYS:
        raise SettingsError(f"{ABOUT} have {len(value)} keys, may have {MOST_KEYS}: remove those that are not known")
    return value
