"""RAPL: the energy that a CPU's packages have used, counted by the processor, where the kernel lets it be read.

One file a package, in microjoules, which starts again at ``max_energy_range_uj``: the counter here goes on. It is the
whole package's, whoever used it, and since 2020 (CVE-2020-8694) it is readable by root only on most systems.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

POWERCAP: Final = Path("/sys/class/powercap")


class Rapl:
    """Joules of all packages since the first reading that it can remember; not for use from several threads."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._root = root
        #: Package → (last raw microjoules, microjoules before the counter's last start).
        self._seen: dict[str, tuple[int, int]] = {}

    def read(self) -> tuple[float | None, str]:
        """(joules, "") or (None, why not)."""
        packages = sorted(p for p in self._root.glob("*-rapl:*") if p.name.count(":") == 1)
        if not packages:
            return None, "this machine shows no RAPL counter (virtual machines seldom do)"
        total = 0
        for package in packages:
            try:
                raw = int((package / "energy_uj").read_text())
                most = int((package / "max_energy_range_uj").read_text())
            except PermissionError:
                return None, f"no permission to read {package / 'energy_uj'} (root only, usually)"
            except (OSError, ValueError) as error:
                return None, f"{package} cannot be read: {error}"
            before, base = self._seen.get(package.name, (raw, 0))
            if raw < before:
                base += most
            self._seen[package.name] = (raw, base)
            total += base + raw
        return total / 1e6, ""
