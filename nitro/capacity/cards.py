"""What NVIDIA's datasheets say of cards: memory, bandwidth and bf16 speed.

The figures of l4, l40s, a100, h100, h200 and b200 were compared with other public tables of them; those of the other
cards were not looked up a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

from nitro._suggest import did_you_mean
from nitro.errors import SettingsError

GIB = 2**30
DRIVER_GIB = 0.5
"""A guess: what driver and context keep from a card before anybody allocates."""


@dataclass(frozen=True, slots=True)
class Card:
    """One card, in the datasheet's figures.

    Attributes:
        name: as it is asked for.
        memory_gb: memory in the datasheet's GB, which drivers report as GiB.
        bandwidth: of the memory, in bytes a second.
        flops: dense bf16 tensor operations a second with fp32 accumulation (half of what datasheets give "with
            sparsity").
        inline_ecc: whether ECC takes a sixteenth of the memory, as it does on cards with GDDR6 where it is on.
        source: where the figures are from.
    """

    name: str
    memory_gb: float
    bandwidth: float
    flops: float
    source: str
    inline_ecc: bool = False

    @property
    def visible_bytes(self) -> int:
        """Return the memory that CUDA reports, in bytes: ``(GB - ECC's sixteenth - driver) * 2^30``."""
        gib = self.memory_gb * (15 / 16 if self.inline_ecc else 1) - DRIVER_GIB
        return int(gib * GIB)


_DATA_CENTER = "https://www.nvidia.com/en-us/data-center"
_A100 = f"NVIDIA A100 datasheet, {_DATA_CENTER}/a100/"
_H100 = f"NVIDIA H100 datasheet, {_DATA_CENTER}/h100/"
_H200 = f"NVIDIA H200 datasheet, {_DATA_CENTER}/h200/"
_TABLE = (
    Card("l4", 24, 300e9, 121e12, f"NVIDIA L4 datasheet, {_DATA_CENTER}/l4/", inline_ecc=True),
    Card("a10", 24, 600e9, 125e12, f"NVIDIA A10 datasheet, {_DATA_CENTER}/products/a10-gpu/", inline_ecc=True),
    Card("l40s", 48, 864e9, 362e12, f"NVIDIA L40S datasheet, {_DATA_CENTER}/l40s/", inline_ecc=True),
    Card("a100-40gb", 40, 1555e9, 312e12, _A100),
    Card("a100-80gb-pcie", 80, 1935e9, 312e12, _A100),
    Card("a100-80gb", 80, 2039e9, 312e12, _A100),
    Card("h100-pcie", 80, 2000e9, 756e12, _H100),
    Card("h100-nvl", 94, 3900e9, 835e12, _H100),
    Card("h100", 80, 3350e9, 989e12, _H100),
    Card("h200-nvl", 141, 4800e9, 835e12, _H200),
    Card("h200", 141, 4800e9, 989e12, _H200),
    Card("b200", 180, 8000e9, 2250e12, f"NVIDIA HGX B200 (an eighth of the board), {_DATA_CENTER}/hgx/"),
    Card("rtx-3090", 24, 936e9, 71e12, "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"),
    Card("rtx-4090", 24, 1008e9, 165e12, "NVIDIA Ada GPU Architecture whitepaper, appendix A"),
    Card("rtx-5090", 32, 1792e9, 209e12, "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"),
)
CARDS = {card.name: card for card in _TABLE}


def card_named(name: str) -> Card:
    """Return the card of this name.

    Raises:
        SettingsError: there is none; the message lists those that there are.
    """
    found = CARDS.get(name.lower().replace("_", "-").removeprefix("nvidia-"))
    if found is None:
        raise SettingsError(
            f"card={name!r} is not in the table{did_you_mean(name, CARDS)}: use one of {', '.join(CARDS)}, and "
            "--memory for another size of it"
        )
    return found
