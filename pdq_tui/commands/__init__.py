"""One module a command, imported when the command is asked for. stdout is data, stderr is words."""
