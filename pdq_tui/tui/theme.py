"""Colours. Series colours are theme variables with defaults, so that any Textual theme works.

Series are Okabe and Ito's colours, told apart by people with any kind of colour vision; there is no red/green pair.
Nothing is said by colour alone. Source: M. Okabe, K. Ito, Color Universal Design, 2008.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from textual.theme import BUILTIN_THEMES, Theme

ORANGE, SKY, GREEN, BLUE, VERMILION = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00"

_DARK_SERIES: Final = {"series-a": ORANGE, "series-b": SKY, "series-c": GREEN, "series-band": "#5f6b76"}
_LIGHT_SERIES: Final = {
    "series-a": "#9A6A00",
    "series-b": BLUE,
    "series-c": "#00785A",
    "series-band": "#9aa5b1",
}
_CONTRAST_SERIES: Final = {
    "series-a": "#FFC83D",
    "series-b": "#7FD4FF",
    "series-c": "#3DFFC8",
    "series-band": "#a0a0a0",
}
#: 16-colour terminals: by name, so that the person's own palette decides.
_ANSI_SERIES: Final = {
    "series-a": "ansi_yellow", "series-b": "ansi_cyan", "series-c": "ansi_green", "series-band": "ansi_bright_black",
}  # fmt: skip

#: For terminals that do not say that they have all colours.
ANSI: Final = "pdq-ansi"

THEMES: Final = (
    Theme(
        name="pdq-dark", primary=SKY, secondary=BLUE, warning=ORANGE, error="#FF8A4C", success=SKY, accent=SKY,
        foreground="#D8DEE4", background="#11161B", surface="#161C22", panel="#1D252D", dark=True,
        variables={**_DARK_SERIES, "border": "#8CC8EE", "border-blurred": "#46525E"},
    ),
    Theme(
        name="pdq-light", primary=BLUE, secondary="#33658A", warning="#8A5A00", error="#A63C00", success=BLUE,
        accent=BLUE, foreground="#1B2126", background="#FBFBF8", surface="#F3F3EE", panel="#E6E7E0", dark=False,
        variables={**_LIGHT_SERIES, "border": BLUE, "border-blurred": "#A9B0B6"},
    ),
    Theme(
        name="pdq-contrast", primary="#7FD4FF", secondary="#7FD4FF", warning="#FFC83D", error="#FFA07A",
        success="#7FD4FF", accent="#FFFFFF", foreground="#FFFFFF", background="#000000", surface="#000000",
        panel="#202020", dark=True, text_alpha=1.0,
        variables={**_CONTRAST_SERIES, "border": "#FFFFFF", "border-blurred": "#9A9A9A"},
    ),
    # Frames in grey: Textual's own sixteen-colour theme draws them black, which a dark terminal does not show.
    Theme(
        name=ANSI, ansi=True, primary="ansi_cyan", secondary="ansi_blue", warning="ansi_yellow", error="ansi_red",
        success="ansi_cyan", accent="ansi_cyan", foreground="ansi_default", background="ansi_default",
        surface="ansi_default", panel="ansi_default", boost="ansi_default", dark=True,
        variables={
            **BUILTIN_THEMES["ansi-dark"].variables, **_ANSI_SERIES, "border": "ansi_cyan",
            "border-blurred": "ansi_bright_black",
        },
    ),
)  # fmt: skip

#: T goes through these.
CYCLE: Final = ("pdq-dark", "pdq-light", "pdq-contrast")


def series_defaults(theme: Theme) -> dict[str, str]:
    """The series colours of a theme that does not name its own."""
    if theme.ansi:
        return dict(_ANSI_SERIES)
    return dict(_DARK_SERIES if theme.dark else _LIGHT_SERIES)


def start_theme(wanted: str | None, environment: Mapping[str, str]) -> str:
    """The theme to begin with: what was asked for; else pdq-dark where the terminal has all colours; else 16."""
    if wanted:
        return wanted
    if environment.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return "pdq-dark"
    return ANSI


def shows_unicode(encoding: str | None) -> bool:
    """Whether a terminal stream of this encoding can show what we draw."""
    if not encoding:
        return False
    try:
        "│┤⣿▓…·×±▲".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
