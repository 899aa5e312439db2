"""Nitro's settings: one frozen model, parsed from the ``"nitro"`` object of vLLM's ``additional_config``.

Importing this module imports neither torch nor vLLM: vLLM's front-end parses the settings before anything heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nitro._settings_text import RULES, explain, kind_of, report, show
from nitro._suggest import nearest
from nitro.errors import SettingsError

LARGEST = 3.4028234e38  # of float32, in which scores are compared
OptionValue = bool | int | float | str
Budget = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(gt=0, lt=1)]
Slack = Annotated[int, Field(ge=1)]
Threshold = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Keep = Annotated[int, Field(ge=1)]
COUNTS = ("budget", "ratio", "threshold")
"""Ways to say how many tokens stay, of which exactly one is chosen."""
STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Settings(BaseModel):
    """What a user sets. Use `Settings.parse` on anything that a user wrote: its errors are the readable ones."""

    model_config = STRICT

    policy: str = Field("keydiff", description="The rule that scores tokens; `docs/policies.md` describes each one.")
    policy_options: dict[str, OptionValue] = Field(default_factory=dict, description="The policy's own options.")
    budget: Budget | None = Field(
        None, description="Tokens that a request may hold in each layer and KV head after an eviction."
    )
    ratio: Ratio | None = Field(
        None, description="Retention ratio: the share of a request's tokens that stay after an eviction."
    )
    threshold: Threshold | None = Field(
        None,
        description="The data decides: as many of a request's tokens stay as have a score of at least this, in the "
        "mean over layers and KV heads. In the unit of the policy's scores (of gravity, their mean is 1).",
    )
    min_keep: Keep | None = Field(
        None,
        description="Tokens that a `threshold` leaves a request at least. Unset: the sinks and the window.",
    )
    max_keep: Keep | None = Field(
        None,
        description="Tokens that a `threshold` leaves a request at most, and to which it is compacted while no worker "
        "has said how many reach the threshold. Unset: no bound.",
    )
    sinks: int = Field(4, ge=0, description="The first tokens of a request, which always stay.")
    window: int = Field(32, ge=1, description="The newest tokens of a request, which always stay.")
    slack: Slack = Field(
        64, description="How many tokens a request may grow beyond what it may keep before it is compacted."
    )
    evict_prompt: bool = Field(
        True,
        description="Whether the prompt may be evicted, at the end of the prefill and between its chunks. If not, "
        "its tokens always stay and do not count against the budget.",
    )
    pooling: Literal["none", "merge"] = Field(
        "none",
        description="What becomes of evicted tokens: `none` drops them, `merge` folds their values into the survivors "
        "with the nearest keys (`docs/pooling.md`; on CPUs only).",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the policies that draw random numbers.")

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        problems = contradictions(dict(self))
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @classmethod
    def parse(cls, obj: object) -> Settings:
        """Check what a user wrote: a mapping such as the JSON object, or settings that are parsed already.

        The policy is found and constructed (which imports torch) so that its name and its options are checked, too.

        Raises:
            SettingsError: with every problem found, each naming the key, the value, the bound and the remedy.
        """
        if isinstance(obj, Settings):
            return obj
        if not isinstance(obj, Mapping):
            raise SettingsError(
                f'nitro settings must be a JSON object, e.g. {{"policy": "keydiff", "budget": 512}}; '
                f"got {show(obj)}, {kind_of(obj)}"
            )
        values = {name: obj.get(name, default) for name, default in defaults().items()}
        try:
            settings = cls.model_validate(dict(obj))
            problems: list[str] = []
            doubtful: set[str | None] = set()
        except ValidationError as error:
            # One problem a key, although pydantic has one for each type that an option's value might have had.
            errors = error.errors(include_url=False)
            details = {d["loc"][:2]: d for d in reversed(errors) if d["loc"]}
            nameless = [d for d in errors if not d["loc"] and d["type"] != "value_error"]
            problems = [explain(d) for d in (*nameless, *reversed(details.values()))]
            doubtful = {nearest(str(loc[0]), RULES) for loc in details}
            # Pydantic compares settings once all are sound by themselves; to report all, compare those that are.
            problems += contradictions({name: value for name, value in values.items() if name not in doubtful})
        if not doubtful & {"policy", "policy_options"}:
            problems += _policy_problems(values["policy"], values["policy_options"], values["threshold"])
        if problems:
            raise SettingsError(report(problems))
        return settings

    def to_dict(self) -> dict[str, Any]:
        """Return every setting that has a value, JSON-able; ``Settings.parse`` of it gives equal settings."""
        return self.model_dump(mode="json", exclude_none=True)


def defaults() -> dict[str, Any]:
    """Return each setting's default by name."""
    return {name: field.get_default(call_default_factory=True) for name, field in Settings.model_fields.items()}


def contradictions(settings: Mapping[str, Any], *, otherwise: str = ", or lower sinks or window") -> list[str]:
    """Return what is wrong between settings that are sound one by one.

    Args:
        settings: by name; leave out those in doubt, about which nothing is said then.
        otherwise: what can be done about a budget that is too small, other than raise it.
    """
    counts = {name: settings[name] for name in COUNTS if settings.get(name) is not None}
    if len(counts) > 1:
        said = " and ".join(f"{name}={value}" for name, value in counts.items())
        together = "both" if len(counts) == 2 else "all"
        choices = ", ".join(name for name in COUNTS if name in settings)
        return [f"{said} are {together} set, but only one of {choices} may be: remove the others"]
    bounds = _bounds_of_threshold(settings)
    if set(COUNTS) <= settings.keys() and not counts:
        return [
            "none of budget, ratio and threshold is set, but exactly one must be: set budget (tokens a request may "
            "hold, e.g. 512), ratio (share of its tokens that stay, 0 < ratio < 1, e.g. 0.25) or threshold (the score "
            "from which tokens stay)",
            *bounds,
        ]
    return [*bounds, *_too_small(settings, otherwise)]


def _bounds_of_threshold(settings: Mapping[str, Any]) -> list[str]:
    if "threshold" in settings and settings["threshold"] is None:
        return [
            f"{name}={settings[name]} is set without a threshold, whose bound it is: remove it, or set threshold in "
            "place of budget or ratio"
            for name in ("min_keep", "max_keep")
            if settings.get(name) is not None
        ]
    low, high = settings.get("min_keep"), settings.get("max_keep")
    if low is not None and high is not None and high < low:
        return [f"max_keep={high} is below min_keep={low}: raise max_keep, or lower min_keep"]
    return []


def _too_small(settings: Mapping[str, Any], otherwise: str) -> list[str]:
    if not {"sinks", "window"} <= settings.keys():
        return []
    least = settings["sinks"] + settings["window"]
    return [
        f"{name}={value} is below sinks + window = {least}: raise {name} to at least {least}{otherwise}"
        for name in ("budget", "min_keep", "max_keep")
        if (value := settings.get(name)) is not None and value < least
    ]


def _policy_problems(policy: str, options: Mapping[str, OptionValue], threshold: object) -> list[str]:
    from nitro import policies  # imports torch with the policy's module: only when settings are parsed

    try:
        highest = policies.get(policy, **options).highest
    except SettingsError as error:
        return [str(error)]
    if isinstance(threshold, (int, float)) and threshold > highest:
        return [
            f"threshold={threshold} is more than policy {policy!r} ever scores ({highest:g}), so that requests would "
            "keep the least that they may: lower it"
        ]
    return []
