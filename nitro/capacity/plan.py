"""A plan: how many requests fit a card with and without Nitro, and how fast memory and arithmetic let them be."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from nitro.capacity.cards import GIB, Card, card_named
from nitro.capacity.holding import Burst, Holding, Load, burst, hold
from nitro.capacity.pool import Layout, guessed_reserve, pool_blocks, weight_bytes
from nitro.capacity.question import KV_DTYPES, Question
from nitro.capacity.shapes import Shape, shape_of
from nitro.errors import SettingsError

if TYPE_CHECKING:
    from nitro.planner import BudgetRule

_LARGE_CARD = 70 * GIB


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two engines.

    Attributes:
        blocks: of the pool of each GPU.
        holding: of one request.
        users: requests that can all be at their peak at once, so that none is ever preempted.
        users_mean: requests that fit at random points of their answers.
        kv_bytes: of a request in the mean, over all GPUs.
        decode_tokens_per_s: roofline of steps that only decode, ``users_mean`` or ``max_seqs`` at once.
        tokens_per_s: the same with the prompts' arithmetic in between.
        burst: of ``requests`` at once, in a pool without limit; None if it was not asked for.
    """

    blocks: int
    holding: Holding
    users: int
    users_mean: int
    kv_bytes: int
    decode_tokens_per_s: float
    tokens_per_s: float
    burst: Burst | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer.

    Attributes:
        question: with ``max_seqs`` and ``reserve_gib`` filled in.
        shape: of the model.
        card: whose figures count.
        layout: of the cache.
        memory: of a GPU as CUDA reports it, in bytes.
        weights: on a GPU, in bytes.
        reserve_guessed: whether nobody said what a GPU needs beside weights and cache.
        stock: without Nitro.
        nitro: with it; None where Nitro refuses the model.
    """

    question: Question
    shape: Shape
    card: Card
    layout: Layout
    memory: int
    weights: int
    reserve_guessed: bool
    stock: Side
    nitro: Side | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        found: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("question", "shape", "card", "layout", "stock"):
            found[name] = asdict(found[name])
        found["nitro"] = None if self.nitro is None else asdict(self.nitro)
        return found | {
            "kv_bytes_per_token": self.layout.slot_bytes * self.question.tensor_parallel,
            "refusals": list(self.shape.refusals),
        }


def fitting(pool: int, holding: Holding, load: Load, chunk: int) -> int:
    """Return the most requests that can all be at their peak at once.

    ``n * decode_peak + min(n, p) * (prefill_peak - decode_peak) <= pool - 1``, where one block is vLLM's null block,
    and ``p = chunk // prompt + 1`` prompts at most can be computed in one step.
    """
    usable, decode = pool - 1, holding.decode_peak
    more = max(holding.prefill_peak - decode, 0)
    prompts = chunk // load.prompt + 1
    few = max(usable // (decode + more), 0)
    if few < prompts:
        return few
    return max(prompts, (usable - prompts * more) // decode)


def roofline(question: Question, shape: Shape, card: Card, layout: Layout, holding: Holding, users: int) -> float:
    """Return the tokens a second that ``users`` requests cannot exceed in steps that only decode.

    ``users / max(bytes / bandwidth, operations / flops)`` on each GPU, with the bytes of the weights and of the slots
    that are attended to, and two operations for each weight and each channel of K and V of each query head
    (Williams et al., "Roofline", CACM 52(4), 2009). Host, launches, samplers and communication take no time in it.
    """
    if not users:
        return 0.0
    parts = question.tensor_parallel
    weights = weight_bytes(shape, question.weight_bits, parts)
    read = weights * shape.parameters.read(users) / shape.parameters.total
    read += users * holding.mean_read * layout.slot_bytes
    operations = users * (2 * shape.parameters.active + _attention(shape, holding.mean_read)) / parts
    return users / max(read / card.bandwidth, operations / card.flops)


def _attention(shape: Shape, slots: float) -> float:
    """Return the operations of one token's attention to so many slots, in all layers."""
    return 4 * shape.layers * shape.heads * (shape.latent or shape.head_dim) * slots


def _with_prompts(question: Question, shape: Shape, card: Card, decode: float) -> float:
    """Return tokens a second where each request's prompt is computed in between, at the card's dense bf16 speed."""
    if not decode:
        return 0.0
    operations = question.prompt * (2 * shape.parameters.active + _attention(shape, question.prompt / 2))
    prompt_seconds = operations / card.flops / question.tensor_parallel
    return question.answer / (question.answer / decode + prompt_seconds)


def make_plan(question: Question) -> Plan:
    """Answer a question.

    Raises:
        SettingsError: the model or the card are unknown, the model does not fit, or settings contradict each other.
    """
    shape, card = shape_of(question.model), card_named(question.card)
    memory = card.visible_bytes if question.memory_gib is None else int(question.memory_gib * GIB)
    seqs = question.max_seqs or (1024 if memory >= _LARGE_CARD and not card.name.startswith("a100") else 256)
    if seqs > question.max_batched:
        raise SettingsError(
            f"max_batched={question.max_batched} is below max_seqs={seqs}: each running request takes a token of a "
            "step, so raise max_batched or lower max_seqs"
        )
    guessed = guessed_reserve(shape, max_batched=question.max_batched, max_seqs=seqs)
    reserve = guessed if question.reserve_gib is None else int(question.reserve_gib * GIB)
    layout = Layout.of(
        shape,
        block_size=question.block_size,
        kv_bytes=KV_DTYPES[question.kv_dtype],
        tensor_parallel=question.tensor_parallel,
    )
    weights = weight_bytes(shape, question.weight_bits, question.tensor_parallel)
    asked = replace(question, max_seqs=seqs, reserve_gib=reserve / GIB)

    def side(rule: BudgetRule, *, nitro: bool) -> Side:
        blocks = pool_blocks(memory, question.utilisation, weights + reserve, layout, nitro=nitro)
        if blocks < 2:
            raise SettingsError(
                f"{shape.name} does not fit: {weights / GIB:.1f} GiB of weights and {reserve / GIB:.1f} GiB reserve "
                f"leave no block of {question.utilisation:.0%} of {memory / GIB:.1f} GiB: use a larger card, "
                "--tensor-parallel or --weight-bits"
            )
        load = Load(question.prompt, question.answer)
        holding = hold(rule, load, layout, question.max_batched)
        users = fitting(blocks, holding, load, question.max_batched)
        mean = max(int((blocks - 1) / holding.mean_blocks), users)
        decode = roofline(question, shape, card, layout, holding, min(mean, seqs))
        return Side(
            blocks=blocks,
            holding=holding,
            users=users,
            users_mean=mean,
            kv_bytes=int(holding.mean_blocks * layout.block_bytes * question.tensor_parallel),
            decode_tokens_per_s=decode,
            tokens_per_s=_with_prompts(question, shape, card, decode),
            burst=burst(rule, load, layout, requests=question.requests, chunk=question.max_batched, max_seqs=seqs)
            if question.requests
            else None,
        )

    never = replace(question.rule, budget=None, ratio=None)
    return Plan(
        question=asked,
        shape=shape,
        card=card,
        layout=layout,
        memory=memory,
        weights=weights,
        reserve_guessed=question.reserve_gib is None,
        stock=side(never, nitro=False),
        nitro=None if shape.refusals else side(question.rule, nitro=True),
    )
