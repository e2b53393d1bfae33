"""Every path that this program reads or writes, in one place. ``PDQ_HOME`` moves them all under one directory."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

APP = "pdq-tui"


def _base(kind: str, default: str) -> Path:
    home = os.environ.get("PDQ_HOME")
    return Path(home).expanduser() / kind if home else Path(default)


def config_dir() -> Path:
    return _base("config", platformdirs.user_config_dir(APP))


def state_dir() -> Path:
    return _base("state", platformdirs.user_state_dir(APP))


def cache_dir() -> Path:
    return _base("cache", platformdirs.user_cache_dir(APP))


def config_file() -> Path:
    return config_dir() / "config.toml"


def user_policies() -> Path:
    return config_dir() / "profiles"


def user_kernels() -> Path:
    """Kernel tables: the user's own entries, and what ``tune`` measured."""
    return config_dir() / "kernels_cfg"


def runs_dir() -> Path:
    return state_dir() / "runs"


def log_file() -> Path:
    return state_dir() / "pdq.log"


def demo_dir() -> Path:
    """The demo model: the fetched wheel's GGUF and the converted safetensors copy."""
    return cache_dir() / "demo"


def shipped(kind: str) -> Path:
    """``profiles``, ``kernels_cfg`` or ``servers_cfg``: inside the wheel under ``_shipped``, in a checkout at the top."""
    package = Path(__file__).resolve().parent
    inside = package / "_shipped" / kind
    return inside if inside.is_dir() else package.parent / kind
