"""The app on a recording: the same screens, and the keys of a player in place of those that make something run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final, Protocol, cast

from textual.binding import Binding, BindingType
from textual.screen import Screen

from pdq_tui import errors
from pdq_tui.tui.app import PdqApp
from pdq_tui.tui.keys import bound
from pdq_tui.tui.live import LiveScreen


class Player(Protocol):
    """What the keys need of ``host.replay.ReplaySession``."""

    @property
    def length_s(self) -> float: ...
    def toggle(self) -> None: ...
    def faster(self, step: int) -> None: ...
    def seek(self, seconds: float) -> None: ...
    def skip(self, seconds: float) -> None: ...
    def step(self, requests: int) -> None: ...


#: Work on every screen: what is compared or read goes on while the recording plays.
PLAYER: Final[tuple[Binding, ...]] = (
    bound("full_stop", "step(1)", "Step", "replay.next", "to the end of the next request, and pause"),
    bound("comma", "step(-1)", "Step back", "replay.previous", "to the end of the request before, and pause"),
    bound("greater_than_sign", "skip(10)", "+10 s", "replay.forward", "10 s further"),
    bound("less_than_sign", "skip(-10)", "-10 s", "replay.back", "10 s back"),
    bound("plus", "faster(1)", "Faster", "replay.faster", "play faster"),
    bound("minus", "faster(-1)", "Slower", "replay.slower", "play more slowly"),
    bound("home", "edge(0)", "Begin", "replay.begin", "to the beginning"),
    bound("end", "edge(1)", "End", "replay.end", "to the end"),
)


class ReplayLive(LiveScreen):
    """Pausing the display is pausing the recording: nothing goes on behind it."""

    def action_freeze(self) -> None:
        cast("ReplayApp", self.app).player.toggle()
        self.redraw(charts=False)


class ReplayApp(PdqApp):
    """``session``: a ``host.replay.ReplaySession``; ``options.readonly`` has to be on, since nothing can be changed."""

    SCREENS: ClassVar[dict[str, Callable[[], Screen[Any]]]] = {**PdqApp.SCREENS, "live": ReplayLive}
    BINDINGS: ClassVar[list[BindingType]] = list(PLAYER)

    @property
    def player(self) -> Player:
        return cast(Player, self.session)

    def action_step(self, requests: int) -> None:
        self.player.step(requests)
        self._redraw()

    def action_skip(self, seconds: float) -> None:
        self.player.skip(seconds)
        self._redraw()

    def action_faster(self, step: int) -> None:
        self.player.faster(step)
        self._redraw()

    def action_edge(self, end: int) -> None:
        self.player.seek(self.player.length_s if end else 0.0)
        self._redraw()

    def action_leave(self) -> None:
        """Nothing is live, so nothing is asked."""
        self.leave(errors.OK)
