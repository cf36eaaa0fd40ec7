"""The two streams: results on stdout, everything for the person who waits on stderr."""

from rich.console import Console


class PipeConsole(Console):
    """Leaves a closed pipe to `cli.main`; rich would exit with 1 at once."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


stdout = PipeConsole(soft_wrap=True, highlight=False)
stderr = PipeConsole(stderr=True, soft_wrap=True, highlight=False)
