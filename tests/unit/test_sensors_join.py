"""Which GPU is the engine's (N05), and which clock bits are throttling (N11)."""

from __future__ import annotations

import pytest

from pdq_tui.sensors.clocks import throttling
from pdq_tui.sensors.join import Identity, Visible, match, plain_bus, visible_devices

A = Identity(0, "GPU-11111111-aaaa-bbbb-cccc-000000000000", "00000000:17:00.0")
B = Identity(1, "GPU-22222222-aaaa-bbbb-cccc-000000000001", "00000000:65:00.0")
C = Identity(2, "GPU-22223333-aaaa-bbbb-cccc-000000000002", "00000001:65:00.0")
GPUS = (A, B, C)
CUT = Identity(0, A.uuid, A.bus_id, mig_mode=True)
SLICE0 = Identity(0, "MIG-aaaaaaaa-0000-0000-0000-000000000000", A.bus_id, True, 0)
SLICE1 = Identity(0, "MIG-bbbbbbbb-0000-0000-0000-000000000001", A.bus_id, True, 1)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("2,0", ("2", "0")),
        ("0,9,1", ("0",)),
        ("0,0", ()),
        ("0,-1,1", ("0",)),
        ("0,GPU-22222222-aaaa-bbbb-cccc-000000000001", ("0",)),
        ("GPU-22222222-aaaa-bbbb-cccc-000000000001", (B.uuid,)),
        ("GPU-22222222", (B.uuid,)),
        ("GPU-2222", ()),
        ("GPU-1,GPU-2222", (A.uuid,)),
        ("GPU-1,GPU-11111111", ()),
        ("GPU-99", ()),
        ("GPU-1,0", (A.uuid,)),
        ("what", ()),
    ],
)
def test_N05_cuda_visible_devices_is_read_as_cuda_reads_it(value, names):
    visible = visible_devices(value, GPUS)
    assert visible.names == names
    if names == ():
        assert visible.reason


def test_N05_says_which_entry_is_ambiguous_or_beyond_the_end():
    assert "ambiguous" in (visible_devices("GPU-2222", GPUS).reason or "")
    assert "'9'" in (visible_devices("0,9,1", GPUS).reason or "")
    assert visible_devices("0,1", GPUS) == Visible(("0", "1"))


def test_N05_a_mig_uuid_names_a_slice_only():
    devices = (CUT, SLICE0, SLICE1, B)
    assert visible_devices("MIG-aaaa", devices).names == (SLICE0.uuid,)
    assert visible_devices("MIG-cccc", devices).names == ()
    assert visible_devices("2", devices).names == (), "slices have no index of their own"


@pytest.mark.parametrize(
    "uuid",
    ["GPU-22222222-aaaa-bbbb-cccc-000000000001", "22222222-AAAA-bbbb-cccc-000000000001", "GPU-22222222"],
)
def test_N05_full_bare_and_unique_short_uuids_join(uuid):
    assert match(GPUS, uuid, None).found == B


@pytest.mark.parametrize("uuid", ["GPU-2222", "GPU-99999999", "GPU-"])
def test_N05_an_ambiguous_or_unknown_uuid_joins_nothing(uuid):
    joined = match(GPUS, uuid, None)
    assert joined.found is None
    assert joined.reason


def test_N05_a_uuid_that_nvml_does_not_know_is_not_overruled_by_a_bus_id():
    assert match(GPUS, "GPU-99999999", B.bus_id).found is None


def test_N05_bus_id_joins_where_nvml_hides_the_uuid():
    hidden = (A, Identity(1, None, B.bus_id))
    assert match(hidden, B.uuid, "0000:65:00.0").found == hidden[1]


@pytest.mark.parametrize(("text", "plain"), [
    ("00000000:65:00.0", (0, 0x65, 0)),
    ("0000:65:00.0", (0, 0x65, 0)),
    ("65:00", (0, 0x65, 0)),
    ("00000001:CA:1F.0", (1, 0xCA, 0x1F)),
    ("nonsense", None),
])  # fmt: skip
def test_N05_bus_ids_are_compared_as_numbers(text, plain):
    assert plain_bus(text) == plain


def test_N05_domains_are_not_left_out():
    assert match(GPUS, None, "0001:65:00.0").found == C


def test_N05_a_gpu_in_mig_mode_is_never_taken_for_its_slice():
    assert match((CUT, SLICE0, SLICE1), None, A.bus_id).found is None
    assert match((CUT, SLICE0, SLICE1), A.uuid, None).found is None
    assert match((CUT, SLICE0), A.uuid, A.bus_id).found == SLICE0
    assert match((CUT, SLICE0, SLICE1), "bbbbbbbb-0000-0000-0000-000000000001", A.bus_id).found == SLICE1


@pytest.mark.parametrize(("mask", "names"), [
    (0, []),
    (0x1, []),
    (0x2 | 0x100, []),
    (0x4 | 0x20, ["power cap", "thermal slowdown"]),
    (0x8 | 0x40 | 0x80, ["hw slowdown", "hw thermal slowdown", "hw power brake"]),
    (0x800, ["0x800"]),
    (0x1 | 0x8000000000000000, ["0x8000000000000000"]),
])  # fmt: skip
def test_N11_idle_and_set_clocks_are_not_throttling_and_unknown_bits_are_shown(mask, names):
    assert throttling(mask) == names
