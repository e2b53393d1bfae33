"""The palette: everything that a key does, and policies, metrics, snapshots and exports, found by name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from pdq_tui.core.metrics import METRICS
from pdq_tui.tui import keys
from pdq_tui.tui.export import FORMATS
from pdq_tui.tui.lines import literal
from pdq_tui.tui.pictures import METRIC_CHARTS

if TYPE_CHECKING:
    from pdq_tui.core.policy import Policy
    from pdq_tui.tui.app import PdqApp

#: Snapshots that the palette offers; the comparison's own list has all.
_SNAPSHOTS: Final = 50
#: (name, help, what it does)
Command = tuple[str, str, Callable[[], object]]


class Palette(CommandPalette):
    """Textual's, except that a page key may come before its list has lines: it looks those up without asking."""

    def _action_command_list(self, action: str) -> None:
        lost = (KeyError, IndexError) if action in ("page_up", "page_down") else ()
        with contextlib.suppress(*lost):
            super()._action_command_list(action)


class PdqCommands(Provider):
    """Commands of the app, of the live screen (wherever one is), and one an arm and policy, metric, format, snapshot."""

    async def startup(self) -> None:
        self.commands = [*self._commands(), *await asyncio.to_thread(self._snapshots)]

    @property
    def pdq(self) -> PdqApp:
        return cast("PdqApp", self.app)

    def _commands(self) -> Iterator[Command]:
        readonly = self.pdq.readonly
        for binding in keys.APP:
            if binding.action != "command_palette" and keys.works(binding.action, readonly):
                yield binding.description, binding.tooltip, partial(self.pdq.run_action, binding.action)
        for binding in keys.LIVE:
            name = binding.action.split("(")[0]
            if name in ("escape", "focus_panel") or not keys.works(name, readonly):
                continue
            yield (
                f"Live: {binding.description}",
                binding.tooltip,
                partial(self.pdq.run_on_live, binding.action),
            )
        if not readonly:
            yield (
                "Kernels: profile a burst",
                "one prefill and four decode steps of the active arm, apart from all figures",
                partial(self.pdq.run_on_kernels, "trace"),
            )
            yield from self._policies()
        for chart in METRIC_CHARTS:
            metric = METRICS[chart]
            show = partial(self.pdq.run_on_live, f"show_metric('{chart}')")
            yield f"Metric: {metric.short}", f"{metric.name}: {metric.formula}", show
        for form, text in FORMATS:
            yield f"Export: {form}", text, partial(self.pdq.export_as, form)
        for theme in sorted(self.pdq.available_themes):
            yield f"Theme: {theme}", "colours of the screen", partial(self.pdq.set_theme, theme)

    def _snapshots(self) -> list[Command]:
        """The newest, wherever this run lies. For a thread: a slow disk must not hold up the keys."""
        from pdq_tui.store.listing import list_snapshots

        folders = dict.fromkeys([self.pdq.runs_dir, Path(self.pdq.session.view(1.0).run_dir).parent])
        found = [s for folder in folders for s in list_snapshots(folder) if s.error is None]
        found.sort(key=lambda s: (s.created, s.id), reverse=True)
        return [
            (
                f"Compare with: {s.id}",
                literal(f"{s.arm} {s.policy} {s.model} {s.note}".strip()),
                partial(self.pdq.compare_with, s.id),
            )
            for s in found[:_SNAPSHOTS]
        ]

    def _policies(self) -> Iterator[Command]:
        from pdq_tui.core.catalog import policies

        for entry in policies().values():
            policy = entry.policy
            if policy is not None:
                for arm in ("A", "B"):
                    yield f"{arm}: {policy.name}", literal(policy.summary), partial(self._apply, arm, policy)

    def _apply(self, arm: str, policy: Policy) -> None:
        self.pdq.session.set_policy(arm, policy)

    async def discover(self) -> Hits:
        for name, text, run in self.commands:
            yield DiscoveryHit(Content(name), run, text=name, help=text)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, text, run in self.commands:
            score = matcher.match(name)
            if score > 0:
                yield Hit(score, matcher.highlight(name), run, text=name, help=text)
