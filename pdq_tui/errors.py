"""The one exception that a person is meant to read.

Exit codes (the same for every command): 0 ok, 1 run failed, 2 usage or configuration, 3 gate failed,
4 environment unfit, 130 interrupted (results kept).
"""

from __future__ import annotations

OK = 0
FAILED = 1
USAGE = 2
GATE = 3
UNFIT = 4
INTERRUPTED = 130

#: The way out where a format of a policy does not run on a device.
OTHER_FORMAT = "choose another format for this stage; pdq-tui doctor lists what runs here"


class PdqError(Exception):
    """An error told in one sentence, with the way out.

    message    what happened, one sentence, without a trailing full stop being required.
    hint       what to do about it, or None where there is nothing to do.
    exit_code  the process exit code if this ends a command.
    """

    exit_code: int = FAILED

    def __init__(self, message: str, hint: str | None = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(PdqError):
    """Wrong flag, wrong value, wrong file: exit code 2."""

    exit_code = USAGE


class UnfitError(PdqError):
    """This machine or installation cannot do what was asked: exit code 4."""

    exit_code = UNFIT
