"""NVML's clock event reasons: which of them are throttling.

Source: NVML API reference, "NvmlClocksEventReasons" (formerly "nvmlClocksThrottleReasons"); the bits are the same.
"""

from __future__ import annotations

from typing import Final

#: Nothing is being slowed down: no work, or clocks that somebody set.
NOT_THROTTLING: Final = {
    0x1: "idle",
    0x2: "application clocks",
    0x100: "display clocks",
}
THROTTLING: Final = {
    0x4: "power cap",
    0x8: "hw slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown",
    0x40: "hw thermal slowdown",
    0x80: "hw power brake",
    0x200: "board limit",
    0x400: "reliability",
}


def throttling(mask: int) -> list[str]:
    """Names of the bits that mean throttling, lowest first. Drivers set bits that no header lists: those as hex."""
    names = []
    for position in range(mask.bit_length()):
        bit = 1 << position
        if mask & bit and bit not in NOT_THROTTLING:
            names.append(THROTTLING.get(bit, hex(bit)))
    return names
