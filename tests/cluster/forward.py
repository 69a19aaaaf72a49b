"""Forward connections from an inherited socket to an address in this process's network namespace."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

_CHUNK_BYTES = 65_536


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


async def forward(listening: socket.socket, host: str, port: int) -> None:
    """Serve until the process ends."""
    carrying: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()  # as if nothing listened here
            return
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        finally:
            far_writer.close()
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(carry(reader, writer))
        # Once the near side has sent everything, the loop holds only weak references to the task. It would be
        # garbage-collected while the far side is still preparing its answer.
        carrying.add(task)
        task.add_done_callback(carrying.discard)

    server = await asyncio.start_server(accept, sock=listening)
    await server.serve_forever()


if __name__ == "__main__":
    descriptor, name, number = sys.argv[1:]
    asyncio.run(forward(socket.socket(fileno=int(descriptor)), name, int(number)))
