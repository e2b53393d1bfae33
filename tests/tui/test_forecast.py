"""What a policy would take is said before it is applied: bytes from shapes, and whether they fit; n/a with a reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_views import BASE, STAGED, arm_view, cpu_sensors, demo_model, gpu_sensors, make_view, starting_view
from made_model import HIDDEN, KV, LAYERS, LINEARS, VOCAB, made_model
from small_app import SmallApp, settle, text_of
from textual.pilot import Pilot

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.formats import WEIGHTS, Format, packed_bytes
from pdq_tui.core.kv import KvPolicy, natural_convert
from pdq_tui.core.tuned import TunedTable, Winner, tuned_file, write_tuned
from pdq_tui.host.view import SessionView
from pdq_tui.tui import forecast
from pdq_tui.tui.lines import LineList
from pdq_tui.tui.policies import PoliciesScreen

INT8 = LAYERS * sum(packed_bytes(Format("int8"), n, k, 2) for n, k in LINEARS.values())
INT4 = LAYERS * sum(packed_bytes(Format("int4", "model", 64), n, k, 2) for n, k in LINEARS.values())
#: Of one token in the model's bf16: keys and values of every layer.
KV_TOKEN = LAYERS * 2 * KV * 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return made_model(tmp_path / "model")


def view_of(model: Path, *, gpu: bool = False, **changes: Any) -> SessionView:
    info = demo_model()
    info.path = str(model)
    return make_view(gpu=gpu, model=info, **changes)


def told(
    view: SessionView, policy: str, budget: int | None = None
) -> tuple[forecast.Question, forecast.Forecast]:
    question = forecast.ask(find_policy(policy), view, budget)
    assert isinstance(question, forecast.Question)
    return question, forecast.answer(question, forecast.shapes_of(question.model))


def test_bytes_of_both_stages_and_of_what_is_not_packed_yet(model: Path) -> None:
    base = {"B": arm_view("B", BASE, {}, 0)}
    question, found = told(view_of(model, arms=base), "w8a8-prefill-int4-decode")
    assert found.prediction.stages["prefill"].bytes == INT8
    assert found.prediction.stages["decode"].bytes == INT4
    assert (found.new_bytes, found.packed_bytes) == (INT8 + INT4, 0)
    both = base | {"A": arm_view("A", STAGED, {}, 0)}
    question, found = told(view_of(model, arms=both), "int4")
    assert (found.new_bytes, found.packed_bytes) == (0, INT8 + INT4)
    assert (question.request, found.kv_bytes) == ((1, 576), 0), "an arm has such a cache"
    assert forecast.fit(question, found) == (True, "nothing has to be packed")
    # On a GPU the model's own dtype is a copy as well.
    _, found = told(view_of(model, arms={}, gpu=True), "bf16")
    assert found.new_bytes == 2 * LAYERS * sum(n * k for n, k in LINEARS.values())


def test_whether_it_fits_is_said_with_the_bytes(model: Path) -> None:
    def fit(budget: int | None = None, **changes: Any) -> tuple[bool | None, str]:
        return forecast.fit(*told(view_of(model, arms={}, **changes), "int4", budget))

    good, why = fit()
    cache = forecast.format_bytes(576 * KV_TOKEN)
    assert good and why.endswith(f"to pack and {cache} of KV cache, 11.0 GiB free")
    assert fit(workload=None)[1].endswith("to pack, 11.0 GiB free")
    sensors = cpu_sensors()
    sensors["sensors"].cpu.memory_available_bytes = INT4 - (1 << 20)
    good, why = fit(**sensors)
    assert good is False and "free" in why
    step = 64 << 20  # what the reading is rounded down to
    sensors["sensors"].cpu.memory_available_bytes = step
    assert INT4 < step < INT4 + 576 * KV_TOKEN
    assert fit(workload=None, **sensors)[0] is True and fit(**sensors)[0] is False
    good, why = fit(sensors=None)
    assert good is None and "n/a (no reading)" in why
    good, why = fit(budget=INT4 - 1)
    assert good is False and "budget" in why
    assert fit(budget=INT4)[0] is True
    sensors = gpu_sensors()
    assert "102.8 GiB free" in fit(gpu=True, **sensors)[1]
    sensors["sensors"].gpus[0].memory_used_bytes = None
    assert fit(gpu=True, **sensors)[0] is None


def test_the_forecast_takes_what_was_measured_here_where_the_engine_does(model: Path) -> None:
    """The engine says by its stamp that a tuned table comes first; one of elsewhere is not taken."""
    stamp = {"cpu": "this one", "threads": "1"}
    winners = [
        Winner(format="int8", dtype="bf16", N=n, K=k, rows=(1, 1), layout="int8", kernel="int8-dequantize", us=1.0, error=0.0)
        for n, k in LINEARS.values()
    ]  # fmt: skip
    write_tuned(tuned_file("cpu"), TunedTable("cpu", stamp, tuple(winners)))

    def kernels(tuned_stamp: dict[str, str]) -> set[str]:
        view = view_of(model, arms={})
        assert view.device is not None
        device = msgspec.structs.replace(
            view.device, features=["bf16", "avx512bf16"], tuned_stamp=tuned_stamp
        )
        _, found = told(dataclasses.replace(view, device=device), "int8")
        return set(found.prediction.stages["decode"].kernels)

    assert "int8-dequantize" in kernels(stamp)
    assert "int8-dequantize" not in kernels({}) and "int8-dequantize" not in kernels({"cpu": "another"})


def predicted(model: Path, decode: str) -> Any:
    """The prediction for bf16 weights with this KV cache in decode."""
    policy = msgspec.structs.replace(
        find_policy("bf16"),
        kv=KvPolicy("bf16", decode, natural_convert("bf16", decode)),
    )
    question = forecast.ask(policy, view_of(model), None)
    assert isinstance(question, forecast.Question)
    return forecast.answer(question, forecast.shapes_of(question.model)).prediction


async def shown(app: SmallApp, pilot: Pilot[Any]) -> str:
    await settle(pilot)
    await settle(pilot)
    return str(app.screen.query_one("#forecast", forecast.ForecastLines).content)


def test_the_decode_floor_is_what_a_step_reads_over_the_measured_peak(model: Path) -> None:
    head = VOCAB * HIDDEN * 2  # the embedding in bf16, read whole as the head
    view = view_of(model, arms={})
    question, found = told(view, "int4")
    middle = 512 + 64 // 2
    assert question.positions == middle
    assert found.step_bytes == INT4 + head + middle * KV_TOKEN
    assert view.device is not None
    for peak, floor in ((20.0, found.step_bytes / 20e6), (None, None)):
        device = msgspec.structs.replace(view.device, read_peak_gbps=peak)
        question, found = told(dataclasses.replace(view, device=device), "int4")
        assert forecast.floor_ms(question, found)[0] == pytest.approx(floor)
        for width in (80, 60, 47, 25):
            said = forecast.words(question, found, width)
            assert [line for line in said if len(line) > width] == []
            assert len(said) == (3 if width == 25 else 4)
            wanted = "n/a" if floor is None else f"≥ {floor:.3g} ms"
            assert wanted in " ".join(said)
            assert any(line.startswith("✓ fits") for line in said), "seen at every width"


async def test_the_editor_foresees_each_change_and_applies_nothing(model: Path, tmp_path: Path) -> None:
    app = SmallApp(lambda: PoliciesScreen(tmp_path / "profiles"), tmp_path)
    app.session.picture = view_of(model, arms={"B": arm_view("B", BASE, {}, 0)})
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        app.screen.query_one("#list", LineList).move_to("bf16")
        assert "no second copy" in await shown(app, pilot)
        app.screen.query_one("#edit", LineList).focus()
        app.screen.query_one("#edit", LineList).move_to("decode.weights")
        await pilot.press(*["h"] * (len(WEIGHTS) - WEIGHTS.index("int4")))
        text = await shown(app, pilot)
        assert f"decode int4-g64 {forecast.format_bytes(INT4)}" in text
        assert f"+{forecast.format_bytes(INT4)} for a second copy" in text
        assert "✓ fits" in text and "fits" in text_of(app)
        bf16, int8 = (
            found.kv_bytes_per_token for found in (predicted(model, "bf16"), predicted(model, "int8"))
        )
        assert f"KV {bf16} B a token" in text
        app.screen.query_one("#edit", LineList).move_to("decode.kv")
        await pilot.press("l", "l")
        assert f"KV {int8} B a token" in await shown(app, pilot) and int8 < bf16
        for size in ((80, 24), (60, 20)):
            await pilot.resize_terminal(*size)
            await shown(app, pilot)
            assert forecast.format_bytes(INT4) in text_of(app) and "✓ fits" in text_of(app)
        assert app.session.calls == []


@pytest.mark.parametrize(
    ("picture", "reason"),
    [
        (starting_view(), "no model is loaded yet (engine starting)"),
        (make_view(), "/home/me/.cache/pdq-tui/demo"),
        (make_view(model=msgspec.structs.replace(demo_model(), path="/dev/null")), "/dev/null"),
    ],
)
async def test_without_shapes_the_forecast_is_na_with_the_reason(
    picture: SessionView, reason: str, tmp_path: Path
) -> None:
    app = SmallApp(lambda: PoliciesScreen(tmp_path / "profiles"), tmp_path)
    app.session.picture = picture
    async with app.run_test(size=(120, 36)) as pilot:
        text = await shown(app, pilot)
        assert text.startswith("predicted bytes n/a: ") and reason in text


async def test_a_policy_that_nothing_here_runs_is_told_with_the_way_out(model: Path, tmp_path: Path) -> None:
    app = SmallApp(lambda: PoliciesScreen(tmp_path / "profiles"), tmp_path)
    app.session.picture = picture = view_of(model, arms={})
    assert picture.device is not None
    picture.device.features = ["avx2"]
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        app.screen.query_one("#list", LineList).move_to("bf16-prefill-nf4-decode")
        text = await shown(app, pilot)
        assert "✗ bf16-prefill-nf4-decode: nf4-g64 in decode does not run on cpu: " in text
        assert "needs the package bitsandbytes, which this machine lacks" in text
        assert text.endswith("; choose another format for this stage; pdq-tui doctor lists what runs here")
        assert "lists what runs here" in text_of(app)
