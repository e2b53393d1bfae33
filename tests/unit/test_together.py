"""What several GPUs read as one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdq_tui.core.protocol import GpuSample
from pdq_tui.core.together import together


def gpu(index: int, **fields: object) -> GpuSample:
    return GpuSample(index=index, name="H200", uuid=f"GPU-{index}", **fields)  # type: ignore[arg-type]


def test_none_and_one() -> None:
    one = gpu(3, power_w=400.0)
    assert together([]) is None and together([one]) is one


def test_amounts_add_shares_average_and_the_worst_of_the_rest_counts() -> None:
    read = together(
        [
            gpu(0, power_w=500.0, memory_used_bytes=10, gpu_util=1.0, temperature_c=60.0, sm_mhz=1980.0),
            gpu(1, power_w=300.0, memory_used_bytes=30, gpu_util=0.5, temperature_c=81.0, sm_mhz=1200.0),
        ]
    )
    assert read is not None and (read.name, read.uuid, read.bus_id) == ("2 GPUs", None, None)
    assert (read.power_w, read.memory_used_bytes, read.gpu_util) == (800.0, 40, 0.75)
    assert (read.temperature_c, read.sm_mhz) == (81.0, 1200.0)


def test_what_one_does_not_tell_is_missing_with_its_reason() -> None:
    read = together([gpu(0, energy_j=5.0), gpu(4, missing={"energy_j": "not supported"})])
    assert read is not None and read.energy_j is None
    assert read.missing["energy_j"] == "GPU 4: not supported" and read.missing["power_w"] == "GPU 0: not read"


def test_what_the_first_alone_did_not_tell_is_no_reason_where_all_told() -> None:
    read = together([gpu(0, power_w=1.0, missing={"power_w": "of an earlier poll"}), gpu(1, power_w=2.0)])
    assert read is not None and read.power_w == 3.0 and "power_w" not in read.missing


def test_throttling_of_either_counts_once() -> None:
    read = together(
        [
            gpu(0, throttle=["power cap"], throttle_raw=4),
            gpu(1, throttle=["thermal", "power cap"], throttle_raw=36),
        ]
    )
    assert read is not None and read.throttle == ["power cap", "thermal"] and read.throttle_raw == 36


@pytest.mark.parametrize("silent", [0, 1])
def test_a_gpu_that_tells_no_throttling_leaves_all_untold(silent: int) -> None:
    """``throttle`` empty means: not throttled. One GPU's silence is not that."""
    gpus = [gpu(0, throttle=[], throttle_raw=0), gpu(1, throttle=[], throttle_raw=0)]
    gpus[silent] = gpu(silent, missing={"throttle": "no permission"})
    read = together(gpus)
    assert read is not None and read.throttle is None and read.throttle_raw is None
    assert read.missing["throttle"] == read.missing["throttle_raw"] == f"GPU {silent}: no permission"


SAMPLES = st.lists(
    st.builds(
        GpuSample,
        index=st.integers(0, 7),
        power_w=st.none() | st.floats(0, 1000),
        gpu_util=st.none() | st.floats(0, 1),
        sm_mhz=st.none() | st.floats(100, 3000),
        throttle=st.none() | st.lists(st.sampled_from(["thermal", "power cap"])),
    ),
    min_size=2,
    max_size=5,
)


@given(SAMPLES)
def test_a_figure_or_a_reason_and_nothing_of_the_samples_changes(gpus: list[GpuSample]) -> None:
    before = msgspec.json.encode(gpus)
    read = together(gpus)
    assert read is not None and msgspec.json.encode(gpus) == before
    for name in ("power_w", "gpu_util", "sm_mhz", "throttle"):
        assert (getattr(read, name) is None) == any(getattr(each, name) is None for each in gpus)
        assert (getattr(read, name) is None) == (name in read.missing)
    if read.gpu_util is not None:
        assert min(g.gpu_util or 0 for g in gpus) - 1e-9 <= read.gpu_util <= 1
