"""The wire between the server and its engine process: JSON messages over a Unix socket, each after its length.

JSON, because nothing in it can run: a process that reads it can be fed wrong data at worst.
"""

import asyncio
import struct
from typing import Any, BinaryIO

from pydantic_core import from_json, to_json

_LENGTH = struct.Struct(">I")
Message = dict[str, Any]


def pack(message: Message) -> bytes:
    """A message as bytes: four of length, big-endian, and the JSON."""
    data = to_json(message, inf_nan_mode="constants")
    return _LENGTH.pack(len(data)) + data


def read(file: BinaryIO) -> Message | None:
    """The next message, or None once the other side is gone. Blocks."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = file.read(length)
    return _object(data) if len(data) == length else None


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """The next message, or None once the other side is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return _object(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _object(data: bytes) -> Message:
    message = from_json(data)
    assert isinstance(message, dict)
    return message
