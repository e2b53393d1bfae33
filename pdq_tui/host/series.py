"""Bounded series of points in time order."""

from __future__ import annotations

from bisect import bisect_left

from pdq_tui.host.view import Point


class Series:
    """At most ``limit`` newest points; closer together than ``spacing_s`` they are thinned out."""

    def __init__(self, limit: int = 8000, spacing_s: float = 0.0) -> None:
        self._points: list[Point] = []
        self._limit = limit
        self._spacing_s = spacing_s

    def add(self, at_s: float, value: float | None) -> None:
        points = self._points
        if points and at_s - points[-1][0] < self._spacing_s:
            return
        points.append((at_s, value))
        if len(points) >= 2 * self._limit:
            del points[: -self._limit]

    def since(self, at_s: float | None) -> tuple[Point, ...]:
        """The points from ``at_s`` on, all of them for None."""
        points = self._points
        if at_s is None:
            return tuple(points[-self._limit :])
        start = bisect_left(points, at_s, key=lambda p: p[0])
        return tuple(points[max(start, len(points) - self._limit) :])

    @property
    def empty(self) -> bool:
        return all(value is None for _, value in self._points[-200:])
