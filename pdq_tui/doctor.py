"""What this machine can do for pdq-tui, line by line: ok, warn or fail, and what to do about it."""
