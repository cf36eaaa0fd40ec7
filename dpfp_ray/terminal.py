"""The two streams: results on stdout, everything for the person who waits on stderr."""

from rich.console import Console

stdout = Console(soft_wrap=True, highlight=False)
stderr = Console(stderr=True, soft_wrap=True, highlight=False)
