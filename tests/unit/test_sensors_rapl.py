"""RAPL from made powercap folders: packages summed, counters that start again, and why there is none."""

from __future__ import annotations

from pathlib import Path

from pdq_tui.sensors.rapl import Rapl


def package(root: Path, number: int, microjoules: int, most: int = 1_000_000_000) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder


def test_packages_are_summed_and_their_parts_are_not_counted_again(tmp_path: Path) -> None:
    package(tmp_path, 0, 5_000_000)
    package(tmp_path, 1, 7_000_000)
    part = tmp_path / "intel-rapl:0:0"  # the cores of package 0, which it holds already
    part.mkdir()
    (part / "energy_uj").write_text("3000000")
    assert Rapl(tmp_path).read() == (12.0, "")


def test_a_counter_that_starts_again_goes_on(tmp_path: Path) -> None:
    rapl = Rapl(tmp_path)
    package(tmp_path, 0, 999_000_000)
    before, _ = rapl.read()
    package(tmp_path, 0, 2_000_000)
    after, _ = rapl.read()
    package(tmp_path, 0, 4_000_000)
    later, _ = rapl.read()
    assert before is not None and after is not None and later is not None
    assert (after - before, later - after) == (3.0, 2.0)


def test_without_a_counter_it_is_none_with_the_reason(tmp_path: Path) -> None:
    value, why = Rapl(tmp_path / "nothing").read()
    assert value is None and "no RAPL counter" in why
    broken = package(tmp_path, 0, 1)
    (broken / "energy_uj").write_text("not a number")
    value, why = Rapl(tmp_path).read()
    assert value is None and "cannot be read" in why
