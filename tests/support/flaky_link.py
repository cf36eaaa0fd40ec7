"""A connection that a test can break: a proxy between a client and a server on this machine."""

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class Link:
    """`url` leads to `target` while the link is whole; `break_off` ends open and new ones."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self.target = (str(parts.hostname), int(parts.port or 80))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.whole = True
        self.refused = 0
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.break_off()
        self.listener.close()

    def break_off(self) -> None:
        self.whole = False
        for one in self.open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self.open.clear()

    def mend(self) -> None:
        self.whole = True

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                if not self.whole:
                    self.refused += 1
                    near.close()
                    continue
                far = socket.create_connection(self.target)
                self.open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                sink.sendall(piece)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
