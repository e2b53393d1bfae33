"""``python -m pdq_tui`` is ``pdq-tui``."""

from pdq_tui.cli import main

if __name__ == "__main__":
    main()
