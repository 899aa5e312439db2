"""The text of ``docs/settings.md``, from the models and the rules of their values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from nitro._settings_text import REQUEST_RULES, RULES, Rule
from nitro.config import Settings, defaults
from nitro.request_settings import MOST_CHARACTERS, SERVER_ONLY, RequestSettings

_SERVER = """\
# Settings

Settings are the `"nitro"` object of vLLM's `--additional-config` (or `LLM(additional_config=...)`):

    vllm serve MODEL --additional-config '{"nitro": {"policy": "keydiff", "budget": 512}}'

Set exactly one of `budget`, `ratio` and `threshold`. Unknown keys, wrong types (`"512"` is not `512`) and
contradictions are errors at start-up, before weights load.
"""

_REQUEST = """\
## Settings of a request

A request may differ from the server in these. In Python they are the `"nitro"` entry of `extra_args`, over HTTP that of
`vllm_xargs`. vLLM lets only strings, numbers and lists of them through there, so that over HTTP the entry is a string
with the JSON object in it (Python takes the string, too):

    SamplingParams(extra_args={"nitro": {"budget": 256, "slack": 32}})

    curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"model": "MODEL", "prompt": "...",
        "vllm_xargs": {"nitro": "{\\"budget\\": 256, \\"slack\\": 32}"}}'

    client.completions.create(..., extra_body={"vllm_xargs": {"nitro": json.dumps({"budget": 256, "slack": 32})}})
"""

_REQUEST_END = """\
Set at most one of `budget` and `ratio`; it takes the place of the server's `budget`, `ratio` or `threshold`. `null` is
the same as leaving a key out (except for `enabled`). A string may have {most_characters} characters. `budget` must be
at least the server's `sinks` plus `window`. A step's evictions are scored together, for all requests, and so these are
always the server's:
{server_only}.

What is wrong is refused before the engine sees the request: with HTTP status 400, or a `ValueError` in Python, and with
a message like those at start-up; other requests do not notice. Where the plugin is installed but Nitro is not switched
on, any `"nitro"` entry is refused: whoever asks for a budget should know that there is none.

All samples of a request (`n` > 1) have its settings, and a request that is preempted keeps them. In a streamed input
session those of the latest part hold from then on; what is gone does not come back. vLLM's beam search does not hand
them on, so that its requests have the server's. So do requests with wrong settings that were put before the engine
ready-made (an `EngineCoreRequest`), unchecked; the engine's log warns once.
"""


def settings_markdown() -> str:
    """Return the text of ``docs/settings.md``."""
    server_only = ", ".join(f"`{name}`" for name in SERVER_ONLY[:-1]) + f" and `{SERVER_ONLY[-1]}`"
    own = {name: field.default for name, field in RequestSettings.model_fields.items()}
    return "\n".join(
        [
            _SERVER,
            *_table(Settings, defaults(), RULES, "unset"),
            "",
            _REQUEST,
            *_table(RequestSettings, own, REQUEST_RULES, "the server's"),
            "",
            _REQUEST_END.replace("{server_only}", server_only).replace("{most_characters}", f"{MOST_CHARACTERS:,}"),
            "This file is generated from the settings models (`nitro._settings_docs.settings_markdown`).\n",
        ]
    )


def _table(
    model: type[BaseModel], default_values: Mapping[str, Any], rules: Mapping[str, Rule], unset: str
) -> Iterator[str]:
    yield "| name | type | default | bound | meaning |"
    yield "|---|---|---|---|---|"
    for name, default in default_values.items():
        rule, meaning = rules[name], model.model_fields[name].description
        shown = unset if default is None else f"`{json.dumps(default)}`"
        yield f"| `{name}` | {rule.type.split(' ', 1)[1]} | {shown} | {rule.bound} | {meaning} |"
