"""A connection that is carried out of a network lives as long as either side has something to say."""

from __future__ import annotations

import asyncio
import gc
import socket

from cluster.forward import forward


def test_an_answer_arrives_though_who_asked_has_long_ended_the_question() -> None:
    async def think(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question = await reader.read()  # up to the end of what the near side says
        gc.collect()
        writer.write(b"answer to " + question)
        writer.close()

    async def ask() -> bytes:
        server = await asyncio.start_server(think, "127.0.0.1", 0)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            host, port = server.sockets[0].getsockname()
            carrier = asyncio.create_task(forward(listening, host, port))
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(b"question")
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), timeout=30)
            writer.close()
            carrier.cancel()
            await asyncio.wait([carrier])
        server.close()
        return answer

    assert asyncio.run(ask()) == b"answer to question"
