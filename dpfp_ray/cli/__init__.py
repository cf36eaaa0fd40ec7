"""One verb of the command line per file: `add_arguments(parser)` and `command(arguments)`."""
