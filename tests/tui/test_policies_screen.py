"""The policy screen: every key, files that are never lost, and text that is never markup."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from made_model import made_model
from small_app import NASTY, SmallApp, at_every_size, settle, text_of

from pdq_tui.core.formats import WEIGHTS
from pdq_tui.core.kv import KvPolicy
from pdq_tui.core.policy import load_policy
from pdq_tui.host.view import ArmView
from pdq_tui.store import atomic
from pdq_tui.tui.ask import Ask, Pick, Write
from pdq_tui.tui.lines import LineList
from pdq_tui.tui.policies import PoliciesScreen


@pytest.fixture
def user_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "profiles"
    folder.mkdir()
    (folder / "mine.toml").write_text('schema = 1\nname = "mine"\n[decode]\nweights = "int8"\n')
    (folder / "broken.toml").write_text('schema = 1\nname = "broken"\nweigths = 3\n')
    return folder


@pytest.fixture
def app(user_dir: Path, tmp_path: Path) -> SmallApp:
    return SmallApp(lambda: PoliciesScreen(user_dir), tmp_path)


def screen_of(app: SmallApp) -> PoliciesScreen:
    found = [s for s in app.screen_stack if isinstance(s, PoliciesScreen)]
    return found[0]


def choose(app: SmallApp, name: str, field: str | None = None) -> PoliciesScreen:
    screen = screen_of(app)
    screen.query_one("#list", LineList).move_to(name)
    if field:
        screen.query_one("#edit", LineList).focus()
        screen.query_one("#edit", LineList).move_to(field)
    return screen


async def test_list_shows_shipped_user_and_damaged_with_the_reason(app: SmallApp) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        assert "bf16-prefill-int8-decode" in text_of(app)
        choose(app, "mine")  # the last one
        await pilot.pause()
        shown = text_of(app)
        assert "w8a8-prefill-int4-decode" in shown and "mine  user" in shown and "! broken  damaged" in shown
        choose(app, "broken")
        await pilot.pause()
        shown = text_of(app)
        assert "weigths: unknown key" in " ".join(shown.split()).replace("│", "")
        for key in ("a", "w", "c"):
            await pilot.press(key)
            await pilot.pause()
            assert "damaged" in screen_of(app).said
        assert app.session.calls == []


async def test_values_step_and_storage_follows(app: SmallApp) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        screen = choose(app, "bf16", "decode.weights")
        await pilot.press("h")  # backwards from bf16: the last format
        assert screen.draft is not None and screen.draft.decode.weights == WEIGHTS[-1]
        back = len(WEIGHTS) - WEIGHTS.index("int4")
        await pilot.press(*["h"] * (back - 1))
        assert screen.draft is not None
        assert (screen.draft.decode.weights, screen.draft.decode.group_size, screen.draft.storage) == (
            "int4",
            64,
            "dual",
        )
        await pilot.press(*["l"] * back)
        assert screen.draft.decode.weights == "bf16" and screen.draft.decode.group_size == 0
        await pilot.press("right", *["left"] * (back + 2))
        assert screen.draft.decode.weights == "int8"
        screen.query_one("#edit", LineList).move_to("decode.activations")
        await pilot.press("l")
        assert screen.draft.decode.activations == "int8"
        screen.query_one("#edit", LineList).move_to("decode.weights")
        await pilot.press("l")
        assert (screen.draft.decode.weights, screen.draft.decode.activations) == ("int4", "int8")
        await pilot.press("l")
        assert screen.draft.decode.activations == "model" and "activations back to model" in screen.said
        screen.query_one("#edit", LineList).move_to("kv.convert")
        await pilot.press("l")
        assert "there is no other value" in screen.said
        screen.query_one("#edit", LineList).move_to("decode.kv")
        await pilot.press("l", "l")
        assert screen.draft.kv == KvPolicy("bf16", "int8", "handoff")
        screen.query_one("#edit", LineList).move_to("prefill.kv")
        await pilot.press("l", "l")
        assert screen.draft.kv == KvPolicy("int8", "int8", "write")
        assert "convert is write now" in screen.said


async def test_choices_that_are_not_here_are_greyed_with_the_reason(app: SmallApp) -> None:
    """Also those that the engine's device does not run: this one lacks bitsandbytes."""
    device = app.session.picture.device
    assert device is not None
    device.features = ["avx2"]
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        screen = choose(app, "bf16", "prefill.weights")
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, Pick)
        refused = {c.value: c.refused for c in app.screen.choices if c.refused is not None}
        assert set(refused) == {"nf4", "fp4", "llm-int8"}
        assert "needs the package bitsandbytes, which this machine lacks" in refused["nf4"]
        assert "n/a: nf4-" in text_of(app)
        for _ in range(12):  # the cursor passes over what cannot be chosen
            await pilot.press("j")
        await pilot.press("enter")
        await pilot.pause()
        assert screen.draft is not None and screen.draft.prefill.weights == "nested16"
        screen.query_one("#edit", LineList).move_to("kv.convert")
        await pilot.press("enter")
        await pilot.pause()
        assert text_of(app).count("n/a: is '") == 2  # neither write nor handoff has something to convert
        await pilot.press("escape")
        await pilot.pause()
        assert app.screen is screen


async def test_exceptions_are_checked_as_they_are_typed(app: SmallApp) -> None:
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        screen = choose(app, "int8", "keep")
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, Write)
        await pilot.press(*"*.layers.0.* = b")
        await pilot.pause()
        assert "is not a format" in text_of(app)
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, Write), "a wrong text is not taken"
        await pilot.press(*"f16 @decode", "enter")
        await pilot.pause()
        assert screen.draft is not None
        (keep,) = screen.draft.keep
        assert keep.modules == ("*.layers.0.*",) and keep.weights == "bf16" and keep.stages == ("decode",)


async def test_apply_sends_the_edited_policy_marked_as_unsaved(app: SmallApp) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        choose(app, "int8")
        await pilot.press("b")
        choose(app, "int8", "decode.activations")
        await pilot.press("l", "a")
        (_, arm_b, plain), (_, arm_a, edited) = app.session.calls
        assert (arm_b, plain.name, arm_a, edited.name) == ("B", "int8", "A", "int8*")
        assert edited.decode.activations == "int8"


async def test_coverage_table_says_what_was_left_and_why(app: SmallApp) -> None:
    async with app.run_test(size=(120, 50)) as pilot:
        await settle(pilot)
        shown = text_of(app)
        for part in (
            "106.2M of 134.5M",
            "left lm_head  54.0 MiB: kept by default",
            "for the second copy",
            "int4-g64-mm ×210",
        ):
            assert part in shown
        arms = dict(app.session.picture.arms)
        arms["A"] = ArmView(
            "A", wanted=arms["A"].wanted, ready=arms["A"].ready, refused="needs 9 GiB [/x] more"
        )
        app.session.change(arms=arms)
        screen_of(app)._refresh_coverage()
        await pilot.pause()
        assert "refused, the arm keeps what it had: needs 9 GiB [/x] more" in text_of(app)


async def test_new_clone_write_undo_delete(app: SmallApp, user_dir: Path) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        screen = screen_of(app)
        await pilot.press("n")
        assert screen.draft is not None and screen.draft.name == "my-policy"
        await pilot.press("w")
        await settle(pilot)
        assert load_policy(user_dir / "my-policy.toml").name == "my-policy"
        choose(app, "w8a8-prefill-int4-decode")
        await pilot.press("c")
        assert screen.draft.name == "w8a8-prefill-int4-decode-copy" and screen.draft.storage == "dual"
        screen.query_one("#edit", LineList).move_to("decode.group_size")
        await pilot.press("l", "u")
        assert screen.draft.decode.group_size == 64
        await pilot.press("u")
        assert "nothing to take back" in screen.said
        await pilot.press("delete")
        await settle(pilot)
        assert "never written" in screen.said
        choose(app, "my-policy")
        await pilot.press("delete")
        await pilot.pause()
        assert isinstance(app.screen, Ask)
        await pilot.press("n")
        await pilot.pause()
        assert (user_dir / "my-policy.toml").exists()
        await pilot.press("delete")
        await pilot.pause()
        await pilot.press("y")
        await settle(pilot)
        assert "my-policy.toml" not in os.listdir(user_dir)  # noqa: PTH208
        choose(app, "bf16")
        await pilot.press("delete")
        assert "shipped" in screen.said


async def test_write_asks_before_it_writes_over_anything(app: SmallApp, user_dir: Path) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        screen = choose(app, "mine", "decode.weights")
        before = (user_dir / "mine.toml").read_text()
        await pilot.press("l", "w")
        await pilot.pause()
        assert isinstance(app.screen, Ask) and "exists" in text_of(app)
        await pilot.press("n")
        await settle(pilot)
        assert (user_dir / "mine.toml").read_text() == before
        await pilot.press("w")
        await pilot.pause()
        await pilot.press("y")
        await settle(pilot)
        assert load_policy(user_dir / "mine.toml").decode.weights == "int4" and "written" in screen.said
        choose(app, "int4")
        await pilot.press("w")
        await pilot.pause()
        assert isinstance(app.screen, Ask) and "shipped" in text_of(app)
        await pilot.press("escape")
        await settle(pilot)
        assert not (user_dir / "int4.toml").exists()


async def test_X04_a_folder_that_cannot_be_written_is_a_sentence(
    app: SmallApp, user_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "put", full)
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        await pilot.press("n", "w")
        await settle(pilot)
        assert "No space left on device" in screen_of(app).said
        assert screen_of(app).draft is not None, "what was edited is still there"
    assert sorted(os.listdir(user_dir)) == ["broken.toml", "mine.toml"], "no part of a file is left"  # noqa: PTH208


async def test_filter_narrows_the_list_and_escape_clears_it(app: SmallApp) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        await pilot.press("slash", *"w8a8", "enter")
        names = [line.key for line in screen_of(app).query_one("#list", LineList).lines]
        assert names and all("w8a8" in str(name) for name in names)
        await pilot.press("escape")
        assert len(screen_of(app).query_one("#list", LineList).lines) > len(names)


@pytest.mark.parametrize("text", NASTY)
async def test_S01_model_and_file_text_is_literal(text: str, user_dir: Path, tmp_path: Path) -> None:
    (user_dir / "bad.toml").write_bytes(f'schema = 1\nname = "{text}"\n'.encode("utf-8", "replace"))
    app = SmallApp(lambda: PoliciesScreen(user_dir), tmp_path)
    arms = dict(app.session.picture.arms)
    ready = arms["A"].ready
    assert ready is not None
    odd = msgspec.structs.replace(ready, warnings=[text])
    arms["A"] = ArmView("A", wanted=arms["A"].wanted, ready=odd, refused=text)
    app.session.change(arms=arms)
    async with app.run_test(size=(120, 50)) as pilot:
        await settle(pilot)
        screen = choose(app, "bad")
        screen.say(text)
        await settle(pilot)
        shown = text_of(app)
        assert "\x1b" not in shown and "damaged" in shown
        if text.isascii() and text.isprintable():
            assert f"keeps what it had: {text}" in shown


async def test_S07_policies_at_every_size(user_dir: Path, tmp_path: Path) -> None:
    await at_every_size(lambda: PoliciesScreen(user_dir), tmp_path, "3 POLICIES")


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
@pytest.mark.parametrize("mode", ["colour", "no_color", "ascii"])
def test_policies_picture(
    size: tuple[int, int], mode: str, user_dir: Path, snap_compare: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "no_color":
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(user_dir.parent)
    app = SmallApp(lambda: PoliciesScreen(Path("profiles")), Path("runs"), plain=mode == "ascii")
    assert app.session.picture.model is not None
    app.session.picture.model.path = str(made_model(user_dir.parent / "model"))

    async def ready(pilot: object) -> None:
        await settle(pilot)  # type: ignore[arg-type]
        choose(app, "mine", "decode.weights")
        await settle(pilot)  # type: ignore[arg-type]
        await settle(pilot)  # type: ignore[arg-type]

    assert snap_compare(app, terminal_size=size, run_before=ready)  # type: ignore[operator]


async def test_a_draft_stays_when_another_policy_is_written(app: SmallApp, user_dir: Path) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        screen = screen_of(app)
        await pilot.press("n")
        await settle(pilot)
        assert "my-policy" in screen.drafts.names
        choose(app, "int8")
        await pilot.press("c", "w")
        await settle(pilot)
        assert (user_dir / "int8-copy.toml").is_file()
        assert "my-policy" in screen.drafts.names and screen.drafts.modified("my-policy")
        (user_dir / "int8-copy.toml").unlink()
        screen._read()
        await settle(pilot)
        assert "int8-copy" not in screen.drafts.names, "what was in a file and is in none any more goes"
