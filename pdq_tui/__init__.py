"""pdq-tui: per-stage (prefill / decode) quantization, toggled live and measured honestly on your own box."""

__version__ = "0.1.0"
