"""Models by hub id: fetched with progress, cancellable, and every way it can fail told in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.errors
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import std as tqdm_std  # type: ignore[import-untyped]

from pdq_tui.engine.cancel import Cancelled, interruptible
from pdq_tui.errors import PdqError, UnfitError, UsageError

# The hub's library took several HTTP libraries in turn; its own errors descend from the one it uses now.
_TQDM: Any = tqdm_std.tqdm
_HTTP_ERROR: Any = vars(huggingface_hub.errors)["HTTPError"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
#: What a causal language model needs; weights in other formats are not fetched.
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]

Progress = Callable[[float, float | None, str], None]


def looks_like_hub_id(word: str) -> bool:
    """A hub id, and no path: a path is absolute, starts with a dot or ~, has more than one slash, ends in .gguf, or
    lies in a directory that exists."""
    if word.endswith(".gguf") or not HUB_ID.fullmatch(word):
        return False
    return "/" not in word or not Path(word).parent.is_dir()


def fetch(
    model: str, revision: str | None, progress: Progress, cancelled: Callable[[], bool]
) -> tuple[Path, str]:
    """(local directory, commit) of a hub model. No token is ever printed.

    Raises UsageError (no such model, gated), UnfitError (offline, unreachable), Cancelled.
    """
    bar = _bar(model, progress, cancelled)

    def work() -> str:
        return str(
            snapshot_download(
                model, revision=revision, allow_patterns=PATTERNS, etag_timeout=10, tqdm_class=bar
            )
        )

    try:
        path = Path(interruptible(work, cancelled))
    except GatedRepoError as error:
        raise UsageError(
            f"{model} is gated: your account has no access to it",
            "accept its terms on huggingface.co, then run: hf auth login",
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"no such directory, and no such model on the hub: {model}",
            "check the spelling; for a private model run: hf auth login",
        ) from error
    except RevisionNotFoundError as error:
        raise UsageError(f"{model} has no revision {revision!r}") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        if constants.HF_HUB_OFFLINE:
            raise UnfitError(
                f"{model} is not in the local cache, and the hub is switched off (HF_HUB_OFFLINE)",
                "give a directory, or unset HF_HUB_OFFLINE",
            ) from error
        raise _unreachable(model) from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise UsageError(
                f"the hub refuses access to {model} ({status})",
                "run: hf auth login, with a token that may read it",
            ) from error
        raise UnfitError(f"the hub answered {status} for {model}", "try again later") from error
    except (_HTTP_ERROR, OSError) as error:
        raise _unreachable(model) from error
    if not (path / "config.json").is_file():
        raise UsageError(f"{model} has no config.json, so it is not a model that can be loaded")
    return path, path.name


def _unreachable(model: str) -> PdqError:
    return UnfitError(
        f"{model} is not in the local cache, and the hub cannot be reached",
        "check the network or the proxy, or give a directory",
    )


def _bar(model: str, progress: Progress, cancelled: Callable[[], bool]) -> Any:
    """A tqdm class that reports bytes to us, and raises in the downloading thread once the task is cancelled."""

    class Bar(_TQDM):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.in_bytes = kwargs.get("unit") == "B"
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)
            self.count = 0.0

        def update(self, n: float | None = 1) -> bool | None:
            if cancelled():
                raise Cancelled
            self.count += n or 0
            if self.in_bytes:
                progress(self.count, self.total, model)
            return None

    return Bar
