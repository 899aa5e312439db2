"""Packing moves bits: everything here compares exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nitro.kernels.compact import pack_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.float64]
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit pattern, NaNs with payloads among them."""
    raw = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return raw.view(dtype).squeeze(-1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(BYTES[x.itemsize])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 33, 64])
def test_equals_a_loop_bit_for_bit(dtype: torch.dtype, width: int) -> None:
    x = random_bits((2, 3, 17, width), dtype)
    index = torch.stack([torch.randperm(17, generator=torch.Generator().manual_seed(i))[:9] for i in range(6)])
    index = index.reshape(2, 3, 9).sort(-1).values
    before = x.clone()
    got = pack_ref(x, index)
    assert got.dtype == dtype
    assert got.shape == (2, 3, 9, width)
    for a in range(2):
        for b in range(3):
            for row, source in enumerate(index[a, b].tolist()):
                assert torch.equal(bits(got)[a, b, row], bits(x)[a, b, source])
    assert torch.equal(bits(x), bits(before))


@given(
    lead=st.lists(st.integers(0, 3), max_size=3),
    n=st.integers(1, 20),
    width=st.integers(1, 5),
    keep=st.integers(0, 20),
    wide=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(lead: list[int], n: int, width: int, keep: int, wide: bool, seed: int) -> None:
    x = random_bits((*lead, n, width), torch.float16, seed)
    index = torch.randint(0, n, (*lead, keep), generator=torch.Generator().manual_seed(seed))
    got = pack_ref(x, index if wide else index.to(torch.int32))
    assert got.shape == (*lead, keep, width)
    if got.numel():
        rows = zip(bits(x).reshape(-1, n, width), index.reshape(-1, keep), strict=True)
        want = torch.stack([row[chosen] for row, chosen in rows])
        assert torch.equal(bits(got).reshape(-1, keep, width), want)


def test_strides_do_not_matter() -> None:
    x = random_bits((2, 8, 3, 16), torch.bfloat16).transpose(1, 2)  # [2, 3, 8, 16]
    x = x.transpose(-1, -2).contiguous().transpose(-1, -2)[..., ::2]
    index = torch.tensor([0, 3, 7]).expand(2, 3, 3)
    assert not x.is_contiguous()
    assert torch.equal(bits(pack_ref(x, index)), bits(x[:, :, [0, 3, 7]].contiguous()))


def test_result_is_new_memory() -> None:
    x = torch.zeros(1, 4, 2)
    pack_ref(x, torch.arange(4).unsqueeze(0)).fill_(1.0)
    assert not x.any()


@pytest.mark.parametrize("index", [[0, 4], [-1, 0]])
def test_index_out_of_bounds(index: list[int]) -> None:
    with pytest.raises(ValueError, match=r"index spans .* must stay within 0 to 3"):
        pack_ref(torch.zeros(4, 2), torch.tensor(index))


@pytest.mark.parametrize(
    ("x_shape", "index_shape"),
    [((2, 4, 2), (3, 2)), ((4, 2), (2, 2)), ((2, 4, 2), (2,)), ((4,), (2,)), ((2, 1, 4, 2), (2, 3, 2))],
)
def test_shapes_must_fit(x_shape: tuple[int, ...], index_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="leading dimensions"):
        pack_ref(torch.zeros(x_shape), torch.zeros(index_shape, dtype=torch.int64))


def test_dtypes_are_checked() -> None:
    with pytest.raises(TypeError, match="index must be int32 or int64"):
        pack_ref(torch.zeros(4, 2), torch.zeros(2))
    with pytest.raises(TypeError, match="1, 2, 4 or 8 bytes"):
        pack_ref(torch.zeros(4, 2, dtype=torch.complex128), torch.zeros(2, dtype=torch.int64))
