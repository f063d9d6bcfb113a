"""Structured output: which tokens an answer may go on with, so that it fits a schema, expression, grammar or choice.

`llguidance` knows the grammars; here is who calls it when. What is allowed is a function of the tokens of the answer
(and of the drafted tokens behind them) alone. A matcher that has read most of them already is kept for each sequence,
which saves time and decides nothing: one that has read something else is rolled back or made anew.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.models.tokenizer import first_line
from octavo.types import RequestError, Sequence, Structure

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer

# Between two parts of a JSON text: nothing, a space, or a new line with its indentation. Any white space at all, which
# JSON allows, is where small models get lost: they never write anything else again.
JSON_OPTIONS = {"whitespace_pattern": r"[ ]?|\n[ ]{0,40}"}
LONGEST = 65_536  # characters of a structure: what compiling costs can grow with their square
_HARMLESS = 2_048  # characters up to which no structure found compiles for long, or overflows the stack
_KEPT = 524_288  # characters of all structures that stay compiled when nobody uses them
_PATIENCE = 30  # seconds for a trial, which may take 2 of a processor that others use, too
# Of llguidance; what one step of one answer may cost. Its own defaults let a bad grammar stall a step for a second.
_LIMITS = {"step_max_items": 10_000, "step_lexer_fuel": 100_000, "verbose_errors": False}


@dataclass(slots=True)
class _State:
    """How far the answer of one sequence has been read."""

    compiled: Any
    matcher: Any = None
    read: list[int] = field(default_factory=list)


class Structures:
    """Compiles structures for one model and follows the answers of its sequences.

    `compile` and `prepare` may be called by any thread; all else belongs to the thread that runs the steps.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.eos_ids = eos_ids
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._words: Any = None
        self._lock = Lock()
        self._compiled: OrderedDict[Structure, Any] = OrderedDict()
        self._states: dict[int, _State] = {}
        self._bits = np.zeros(-(-vocab_size // 32), np.uint32)
        self._end = np.zeros(vocab_size, np.bool_)
        self._end[[token for token in eos_ids if token < vocab_size]] = True  # a config may name others

    def prepare(self) -> None:
        """Make the table of the vocabulary now; it takes up to seconds, once. Raises as `compile` does."""
        with self._lock:
            self._vocabulary()

    def compile(self, structure: Structure) -> Any:
        """The structure ready for use; at once if it was compiled before.

        Raises RequestError if the structure, or any with this model, cannot be followed.
        """
        if (found := self._compiled.get(structure)) is not None:
            return found
        if len(structure.text) > LONGEST:
            raise RequestError(
                f"structure ({structure.kind}) has {len(structure.text)} characters; the limit is {LONGEST}; "
                "split or simplify it.",
                field="structure",
            )
        with self._lock:
            compiled = self._compile(structure)
            self._compiled[structure] = compiled
            while sum(len(kept.text) for kept in self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def begin(self, seqs: Iterable[Sequence]) -> None:
        """Keep the structure of these sequences ready until they are forgotten."""
        for seq in seqs:
            self._state(seq)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._states.pop(seq.id, None)

    def allowed(self, seq: Sequence, after: tuple[int, ...] = ()) -> NDArray[np.bool_]:
        """Which tokens [vocabulary] may come next, behind the drafted tokens `after`; at least one.

        End-of-sequence tokens are among them exactly where the structure is complete. Behind drafts that do not fit,
        where nobody will ever draw, it is them alone.
        """
        state = self._state(seq)
        if not self._read(state, [*seq.output, *after], seq.generated):
            return self._end
        state.matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if state.matcher.is_error():
            raise _lost(state, _reason(state.matcher.get_error()))
        bits = np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def _state(self, seq: Sequence) -> _State:
        if (state := self._states.get(seq.id)) is None:
            structure = seq.request.params.structure
            assert structure is not None
            state = self._states[seq.id] = _State(self.compile(structure))
        return state

    def _read(self, state: _State, tokens: list[int], certain: int) -> bool:
        """Bring the matcher to the end of `tokens`; False if it cannot come there: they hold an end-of-sequence token,
        or behind the `certain` ones something that does not fit."""
        if state.matcher is None:
            state.matcher = state.compiled.deep_copy()
        read = state.read
        if tokens[: len(read)] != read:
            same = next((i for i, (a, b) in enumerate(zip(read, tokens, strict=False)) if a != b), len(tokens))
            state.matcher.rollback(len(read) - same)
            del read[same:]
        new = tokens[len(read) :]
        ended = next((i for i, token in enumerate(new) if token in self.eos_ids), len(new))
        taken = state.matcher.try_consume_tokens(new[:ended])
        read += new[:taken]
        if state.matcher.is_error():
            raise _lost(state, _reason(state.matcher.get_error()))
        if taken < ended and len(read) < certain:
            raise _lost(state, f"token {new[taken]} does not fit")
        return taken == len(new)

    def _compile(self, structure: Structure) -> Any:
        library, words = _library(), self._vocabulary()
        try:
            grammar = _grammar(structure, library)
        except ValueError as error:
            raise _refused(structure, first_line(error)) from error
        if len(structure.text) > _HARMLESS:
            _try_out(structure, grammar)
        limits = library.LLParserLimits(**_LIMITS)
        compiled = library.LLMatcher(words, grammar, log_level=0, limits=limits)
        if not compiled.is_error():  # what goes wrong at the first token would do so in each answer
            first = compiled.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                compiled = first
        if compiled.is_error():
            raise _refused(structure, _reason(compiled.get_error()))
        return compiled

    def _vocabulary(self) -> Any:
        """The tokenizer in llguidance's form."""
        if self._words is None:
            library = _library()
            backend = getattr(self._tokenizer, "backend", None)
            if backend is None or not self.eos_ids:
                lacks = "an end-of-sequence token" if backend is not None else "a tokenizer of the tokenizers library"
                raise _unsupported(f"structured output needs a model with {lacks}; this one has none.")
            backend = copy(backend)
            backend.no_padding()
            backend.no_truncation()
            try:
                ends = sorted(self.eos_ids)
                self._words = library.LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=ends)
            except Exception as error:  # a tokenizer of a kind that the library does not know; its own error types
                raise _unsupported(
                    f"structured output cannot use the model's tokenizer: {first_line(error)}"
                ) from error
        return self._words


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise _unsupported(
            "structured output needs the package llguidance, which is not installed; install it with: "
            "pip install 'octavo[serve]'"
        ) from None
    return llguidance


def _grammar(structure: Structure, library: Any) -> str:
    """The structure as a grammar of llguidance. Raises ValueError if it is no JSON where it has to be."""
    matcher = library.LLMatcher
    if structure.kind == "regex":
        # A digit is 0 to 9: whoever writes \d does not want the hundreds of others that Unicode has.
        return str(matcher.grammar_from_lark(f"start: /{library.regex_to_lark(structure.text, 'd')}/"))
    if structure.kind == "grammar":
        return str(matcher.grammar_from_lark(structure.text))
    if structure.kind == "choice":
        return str(matcher.grammar_from_lark("start: " + " | ".join(_choices(structure.text))))
    schema = '{"type": "object"}' if structure.kind == "json_object" else structure.text
    return str(matcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS))


def _choices(text: str) -> list[str]:
    """The choices as Lark writes strings."""
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("it must be a JSON list of at least one text, none of them empty")
    return [json.dumps(choice, ensure_ascii=False) for choice in choices]


def _try_out(structure: Structure, grammar: str) -> None:
    """Compile it in a process of its own first: one made to do so keeps the library busy for half a minute, takes
    gigabytes, or overflows the stack, which would end this process."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("structure_trial.py"))]
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=_PATIENCE, check=False)
        works = done.returncode == 0
    except subprocess.TimeoutExpired:
        works = False
    if not works:
        raise _refused(structure, "it takes too much time, memory or nesting to compile; simplify it")


def _reason(error: str) -> str:
    """What llguidance says, in one line and without the place in our own wording of the grammar."""
    text = " ".join(re.split(r"\n<|\n +\d+ \| ", error)[0].split())
    return text if len(text) <= 300 else text[:300] + "…"


def _refused(structure: Structure, why: str) -> RequestError:
    return RequestError(f"structure ({structure.kind}) cannot be used: {why.rstrip('.')}.", field="structure")


def _unsupported(message: str) -> RequestError:
    return RequestError(message, code="unsupported", field="structure")


def _lost(state: _State, why: str) -> RequestError:
    """Nothing can come next; whoever asks again begins anew."""
    state.matcher, state.read = None, []
    return RequestError(
        f"the answer cannot follow its structure any further: {why.rstrip('.')}; simplify the structure.",
        code="structure_failed",
        field="structure",
    )
