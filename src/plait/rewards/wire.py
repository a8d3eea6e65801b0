"""Messages between the verifier pool and its workers: eight bytes of length, then that many bytes.

Tasks go to a worker as pickles. What comes back is JSON: a worker has run other people's code, and reading
a pickle would run whatever that code put into it.
"""

import json
import os
import struct
from typing import Any

from plait.batch import Verdict

MAX_REPLY_BYTES = 16 * 2**20
"""A longer reply is rubbish; the worker that sent it is replaced."""

_LENGTH = struct.Struct("<Q")


class RubbishError(Exception):
    """Bytes that are no message of this protocol."""


def framed(body: bytes) -> bytes:
    """The message as it goes over a pipe."""
    return _LENGTH.pack(len(body)) + body


class ReplyReader:
    """Puts replies together from the pieces in which a pipe delivers them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[dict[str, Any]]:
        """The replies that are complete now, in order. Raises RubbishError."""
        self._buffer += piece
        replies = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_REPLY_BYTES:
                raise RubbishError(f"a reply of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            replies.append(_parsed(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return replies


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RubbishError(f"a reply that is not JSON ({error})") from None
    if not isinstance(reply, dict) or not isinstance(reply.get("kind"), str):
        raise RubbishError("a reply without a kind")
    return reply


def read_message(fd: int) -> bytes:
    """Read one message, blocking. EOFError when the other side has closed the pipe."""
    (length,) = _LENGTH.unpack(_read_exactly(fd, _LENGTH.size))
    return _read_exactly(fd, length)


def write_message(fd: int, body: bytes) -> None:
    """Write one message, blocking."""
    left = memoryview(framed(body))
    while left:
        left = left[os.write(fd, left) :]


def _read_exactly(fd: int, size: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < size:
        piece = os.read(fd, min(size - len(pieces), 2**20))
        if not piece:
            raise EOFError
        pieces += piece
    return bytes(pieces)


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """The fields of a verdict; numbers survive exactly."""
    return {
        "kind": verdict.kind,
        "score": verdict.score,
        "reason": verdict.reason,
        "detail": verdict.detail,
        "parts": verdict.parts,
    }


def verdict_from_json(data: Any) -> Verdict:
    """The verdict that was sent. Raises RubbishError where a field is missing or has another type."""
    match data:
        case {
            "kind": "scored" | "abstained" | "failed" as kind,
            "score": float() as score,
            "reason": str() as reason,
            "detail": str() as detail,
            "parts": dict() as parts,
        } if all(isinstance(value, float) for value in parts.values()):
            return Verdict(kind, score, reason, detail, parts)
    raise RubbishError("a reply with something else than verdicts")
