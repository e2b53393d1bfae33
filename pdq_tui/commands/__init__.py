"""One module a command, imported when the command is asked for. stdout is data, stderr is words."""

from typing import Final

#: Command → the module that has it as ``app``. The first is what runs when the first word is no command.
COMMANDS: Final = {
    "app": "app",
    "run": "run",
    "evaluate": "evaluate",
    "search": "search",
    "recheck": "recheck",
    "deploy": "deploy",
    "note": "note",
    "compare": "compare",
    "report": "report",
    "replay": "replay",
    "policies": "policies",
    "snapshots": "snapshots",
    "tune": "tune",
    "trace": "trace",
    "doctor": "doctor",
    "where": "where",
    "config": "settings",
}
