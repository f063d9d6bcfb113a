"""Compiles one grammar (standard input) under limits of time, memory and stack, and ends with 0 if that works.

Run as a script: it imports nothing of Octavo, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading

SECONDS = 2
MEMORY = 512 << 20  # bytes more than the process had when it began
STACK = 4 << 20  # half of what threads usually have: who gets by here has room to spare there


class _Letters:
    """A vocabulary of single bytes."""

    tokens = (*(bytes([value]) for value in range(256)), b"\xff<end>")
    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _compile(grammar: str) -> None:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Letters())), grammar, log_level=0)
    if not matcher.is_error():  # errors are found again by whoever asked, with their reasons
        matcher.deep_copy().compute_bitmask()


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:  # where there is none, time has to do
        size = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    import llguidance  # noqa: F401  # its own size is not the grammar's

    text = sys.stdin.buffer.read().decode()
    _limit()
    threading.stack_size(STACK)
    thread = threading.Thread(target=_compile, args=(text,))
    thread.start()
    thread.join()
