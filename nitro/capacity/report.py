"""What ``nitro plan`` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nitro.capacity.cards import GIB
from nitro.capacity.plan import Plan, Side

Value = float | None
_ROWS: tuple[tuple[str, Callable[[Side], Value]], ...] = (
    ("blocks in the pool (of each GPU)", lambda side: side.blocks),
    ("blocks of a request at its peak, after its prompt", lambda side: side.holding.decode_peak),
    ("  while its prompt is computed", lambda side: side.holding.prefill_peak),
    ("  in the mean, after its prompt", lambda side: side.holding.mean_blocks),
    ("MiB of a request in the mean", lambda side: side.kv_bytes / 2**20),
    ("users that fit, all at their peak", lambda side: side.users),
    ("users that fit in the mean", lambda side: side.users_mean),
    ("roofline, tokens/s, decoding only", lambda side: side.decode_tokens_per_s),
    ("roofline, tokens/s, with prompts", lambda side: side.tokens_per_s),
    ("all at once: most blocks in use", lambda side: None if side.burst is None else side.burst.peak_blocks),
    ("all at once: most running requests", lambda side: None if side.burst is None else side.burst.peak_running),
)


def render(plan: Plan) -> RenderableType:
    """Return the table of a plan, and what must be known about it."""
    question = plan.question
    table = Table(
        title=f"{plan.shape.name} on {question.tensor_parallel} x {plan.card.name}: "
        f"{question.prompt:,} + {question.answer:,} tokens a request",
        caption=f"{plan.layout.slot_bytes * question.tensor_parallel:,} bytes of KV for each token; "
        f"Nitro: {_rule(plan)}",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    for name in ("stock vLLM", "Nitro", "ratio"):
        table.add_column(name, justify="right")
    for label, value in _ROWS:
        stock, ours = value(plan.stock), None if plan.nitro is None else value(plan.nitro)
        if stock is None:
            continue
        ratio = f"{ours / stock:.2f}" if ours is not None and stock else ""
        table.add_row(label, _number(stock), "" if ours is None else _number(ours), ratio)
    return Group(table, *(Text(f"- {line}") for line in notes(plan)))


def notes(plan: Plan) -> Iterator[str]:
    """Yield what the figures rest on, and what to do about them."""
    question = plan.question
    for reason in plan.shape.refusals:
        yield f"Nitro refuses this model: {reason}."
    guess = " (a guess: vLLM measures it, see --reserve)" if plan.reserve_guessed else ""
    yield (
        f"Pool: {question.utilisation:.0%} of {plan.memory / GIB:.1f} GiB, less {plan.weights / GIB:.2f} GiB of "
        f"weights and {question.reserve_gib:.2f} GiB beside{guess}."
    )
    most = max(side.users_mean for side in (plan.stock, plan.nitro) if side is not None)
    if question.max_seqs is not None and most > question.max_seqs:
        yield (
            f"vLLM runs at most max_num_seqs={question.max_seqs:,} requests at once, and the rooflines count no more: "
            "for more, raise --max-seqs here and --max-num-seqs there."
        )
    if plan.stock.users < 1:
        yield "Without Nitro the pool does not hold one such request: vLLM will not start with that --max-model-len."
    if question.kv_dtype == "fp8":
        yield "Nitro serves FP8 caches only where that was tested; otherwise NITRO_ALLOW_UNTESTED_VLLM=1 tries anyway."
    yield (
        f"Rooflines are bounds, not forecasts: datasheet figures of {plan.card.bandwidth / 1e9:,.0f} GB/s and "
        f"{plan.card.flops / 1e12:,.0f} TFLOP/s ({plan.card.source}); hosts, launches and networks take no time in "
        "them."
    )
    yield "What eviction costs in quality is not in this table."


def _rule(plan: Plan) -> str:
    question = plan.question
    kept = f"budget {question.budget}" if question.budget is not None else f"ratio {question.ratio}"
    return f"{kept}, slack {question.slack}" + ("" if question.evict_prompt else ", prompts spared")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"
