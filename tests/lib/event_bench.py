"""Whole evictions of one step, the same by other means, and the attention of that step to compare them with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_bench import Setup, Task, fill_moves, moved_bytes
from score_bench import PAGED, make_inputs, slot_bytes
from torch.nn import functional

from nitro.kernels import compact, score, select

EVENTS = ("gravity", "keydiff", "knorm", "keydiff_unrotated")
NAIVE = "event naive keydiff"
KVPRESS = "event kvpress' way, keydiff"
ATTENTION = "attention of the step"
_MOST_NAIVE = 1000  # (request, layer) pairs; more would take minutes


class UnavailableError(Exception):
    """What a task needs is not on this machine."""


# Qwen2.5-0.5B: what the essay's step attends with. 2,048 requests have between the budget and budget + slack tokens.
_RUNNING = 2048
_QUERY_HEADS = 14


def event_task(setup: Setup, name: str) -> Task:
    """Score, select and fill, as one step does them.

    The mask that is filled by is that of the first call, so that every repetition moves as many tokens: by its own
    mask, the second call would find the survivors in the head already.
    """
    scored, inputs, out = PAGED[name], make_inputs(setup), torch.empty_like(setup.scores)
    mask, _ = select.select_ragged(scored.launch(inputs, out), setup.batch)

    def event() -> None:
        select.select_ragged(scored.launch(inputs, out), setup.batch)
        compact.fill_ragged(setup.layers, setup.batch, mask, setup.positions, scratch=out.view(torch.int32))

    once, again = slot_bytes(setup, scored)
    nbytes = out.numel() * (once + 4 + 1) + moved_bytes(setup, fill_moves(setup, mask))
    # Its parts are checked by tasks of their own.
    return Task(f"event {name}", event, nbytes, lambda: None, nbytes + out.numel() * again if again else 0)


def rival_tasks(setup: Setup) -> Iterator[Task]:
    """The same eviction by other means, where that does not take minutes."""
    if setup.shape.requests * setup.shape.layers <= _MOST_NAIVE:
        yield _naive_task(setup)
        yield _kvpress_task(setup)


def _naive_task(setup: Setup) -> Task:
    """KeyDiff by PyTorch's indexing, one request and layer at a time; positions are not even moved."""
    layers, batch, shape = setup.layers, setup.batch, setup.shape
    targets = torch.arange(shape.keep, device=layers.device)

    def naive() -> None:
        for request in range(shape.requests):
            table, target = batch.block_tables[request], batch.dst_tables[request]
            blocks = target[targets // shape.block_size].long()
            for layer, cache in enumerate(layers.caches):
                rows = layers.rows(layer, table, shape.length)
                keys = rows[..., : shape.head_dim].float()
                anchor = functional.normalize(keys, dim=-1).mean(dim=1, keepdim=True)
                scores = -functional.cosine_similarity(keys, anchor, dim=-1)
                scores[..., : shape.protect] = scores[..., shape.length - shape.window :] = float("inf")
                index = scores.topk(shape.keep).indices.sort().values
                kept = rows.gather(1, index[..., None].expand(-1, -1, rows.shape[2]))
                cache[blocks, :, targets % shape.block_size] = kept.transpose(0, 1)

    def packed() -> torch.Tensor:
        table = batch.dst_tables[shape.requests - 1]
        return torch.stack([layers.rows(layer, table, shape.keep) for layer in range(shape.layers)])

    def check() -> None:
        """Scores that are equal but for rounding may change places, and what lies between them moves up by one."""
        naive()
        want = packed().sort(dim=2).values
        mask, _ = select.select_ragged(score.keydiff(layers, batch), batch)
        compact.pack_ragged(layers, batch, mask, setup.positions)
        assert float((packed().sort(dim=2).values == want).float().mean()) > 0.99

    return Task(NAIVE, naive, _packed_bytes(setup), check)


def _kvpress_task(setup: Setup) -> Task:
    """KeyDiff as kvpress does it: dense caches of one length, all requests at once, a gather of all that stays."""
    shape = setup.shape
    dense = [
        torch.stack([setup.layers.rows(layer, table, shape.length) for table in setup.batch.block_tables])
        for layer in range(shape.layers)
    ]
    pairs = [tuple(x.contiguous() for x in rows.split(shape.head_dim, dim=-1)) for rows in dense]
    del dense

    def press(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        anchor = functional.normalize(keys, p=2, dim=-1).mean(dim=2, keepdim=True)
        scores = -functional.cosine_similarity(keys, anchor, dim=-1)
        index = scores.topk(shape.keep, dim=-1).indices.unsqueeze(-1).expand(-1, -1, -1, shape.head_dim)
        return keys.gather(2, index).contiguous(), values.gather(2, index).contiguous()

    def check() -> None:
        for layer in setup.sample()[0]:
            kept = press(*pairs[layer])
            assert all(x.shape == (shape.requests, shape.heads, shape.keep, shape.head_dim) for x in kept)

    return Task(KVPRESS, lambda: [press(*pair) for pair in pairs], _packed_bytes(setup), check)


def _packed_bytes(setup: Setup) -> int:
    once, _ = slot_bytes(setup, PAGED["keydiff"])
    shape = setup.shape
    moves = setup.scores.numel() // shape.length * shape.keep
    return setup.scores.numel() * (once + 4 + 1) + moved_bytes(setup, moves)


def attention_tasks(setup: Setup) -> Iterator[Task]:
    """Decode attention of 2,048 requests at the essay's shape, with vLLM's FlashAttention, over all layers.

    Raises:
        UnavailableError: vLLM's FlashAttention is missing, or there is too little memory.
    """
    shape, device = setup.shape, setup.layers.device
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported
    except Exception as error:  # vLLM raises what it likes where its extension does not fit
        raise UnavailableError(f"needs vLLM's FlashAttention, which can't be imported: {error!r}") from error
    size, width = shape.block_size, 2 * shape.head_dim
    lengths = shape.keep + torch.arange(_RUNNING, dtype=torch.int32) % (shape.length - shape.keep)
    needs = [-(-length // size) for length in lengths.tolist()]
    layer_bytes = sum(needs) * size * shape.heads * width * setup.layers.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    if free < 1.1 * layer_bytes * shape.model_layers:
        raise UnavailableError(f"needs {layer_bytes * shape.model_layers / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    caches = [
        torch.empty(sum(needs), size, shape.heads, width, dtype=setup.layers.dtype, device=device).normal_()
        for _ in range(shape.model_layers)
    ]
    # One pool: each request's blocks lie anywhere in it.
    pool = iter(torch.randperm(sum(needs)).tolist())
    tables = torch.zeros(_RUNNING, max(needs), dtype=torch.int32)
    for row, need in zip(tables, needs, strict=True):
        row[:need] = torch.tensor([next(pool) for _ in range(need)], dtype=torch.int32)
    tables, on_device = tables.to(device), lengths.to(device)
    query = torch.randn(_RUNNING, _QUERY_HEADS, shape.head_dim, dtype=setup.layers.dtype, device=device)
    starts = torch.arange(_RUNNING + 1, dtype=torch.int32, device=device)
    out = torch.empty_like(query)

    def attend(cache: torch.Tensor, version: int) -> torch.Tensor:
        keys, values = cache.split(shape.head_dim, dim=-1)
        return flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=on_device,
            max_seqlen_k=int(lengths.max()),
            softmax_scale=shape.head_dim**-0.5,
            causal=True,
            block_table=tables,
            fa_version=version,
        )

    def check(version: int) -> None:
        got = attend(caches[0], version).float()
        for request in (0, _RUNNING // 2, _RUNNING - 1):
            length = int(lengths[request])
            rows = caches[0][tables[request].long()].flatten(0, 1)[:length].float().transpose(0, 1)
            keys, values = rows.split(shape.head_dim, dim=-1)
            group = _QUERY_HEADS // shape.heads
            want = functional.scaled_dot_product_attention(
                query[request].float().view(shape.heads, group, -1), keys, values
            ).flatten(0, 1)
            assert torch.allclose(got[request], want, atol=2e-2, rtol=2e-2)

    nbytes = int(lengths.sum()) * shape.heads * width * setup.layers.dtype.itemsize * shape.model_layers
    for version in filter(is_fa_version_supported, (3, 2)):
        yield Task(
            f"{ATTENTION} (FA{version})",
            lambda version=version: [attend(cache, version) for cache in caches],
            nbytes,
            lambda version=version: check(version),
        )
