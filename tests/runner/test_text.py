"""Detokenisation and stop strings (case T1)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from octavo.detokenize import Detokenizer, StopChecker

TEXTS = [
    "Hello, world!",
    "naïve café",
    "你好，世界",
    "🎉🏽👩‍👩‍👧 ok",
    "  two  spaces\n\ttab",
    "é" * 5 + "🎉" * 3,
    "한국어 텍스트",
]


class Bytes:
    """One token per byte, as the worst case of a byte-level vocabulary."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class Fallback:
    """A sentencepiece-like vocabulary: words with ▁, single bytes as <0xNN>, a stripped first space, a special."""

    def __init__(self) -> None:
        vocab = {"<s>": 0, "▁Hi": 1, "▁there": 2, "!": 3, "▁": 4}
        vocab |= {f"<0x{i:02X}>": 5 + i for i in range(256)}
        self.backend = Backend(models.BPE(vocab, [], byte_fallback=True))
        self.backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        self.backend.add_special_tokens(["<s>"])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


FALLBACK = Fallback()


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_become_whole_characters(text: str) -> None:
    detokenizer = Detokenizer(Bytes())
    pieces = [detokenizer.feed([b]) for b in text.encode()]
    assert "".join(pieces) + detokenizer.flush() == text
    assert "�" not in "".join(pieces)
    assert [p for p in pieces if p] == list(text)


def test_byte_fallback_and_spaces_of_a_sentencepiece_vocabulary() -> None:
    tokenizer = Fallback()
    ids = [1, 2, *(5 + b for b in "🎉é".encode()), 2, 0, 2, 3, 4, 1]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed([i]) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids) == "Hi there🎉é there there!  Hi"
    assert "�" not in "".join(pieces)


def test_text_goes_on_from_the_prompt() -> None:
    assert Detokenizer(Fallback(), [1]).feed([2]) == " there"
    assert Detokenizer(Fallback(), []).feed([2]) == "there"


def test_special_tokens_are_shown_on_demand() -> None:
    assert Detokenizer(Fallback(), [1], skip_special_tokens=False).feed([0, 2]) == "<s> there"


class Counting:
    """Adds up the tokens that are decoded."""

    def __init__(self, tokenizer: Fallback) -> None:
        self.tokenizer, self.work = tokenizer, 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.work += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("silent", [0, 999], ids=["special", "beyond the vocabulary"])
@pytest.mark.parametrize(
    ("before", "after"),
    [([], [2]), ([4], [2]), ([1], [2]), ([1, 5 + 0xC3], [5 + 0xA9, 2])],
    ids=["nothing", "space", "word", "half a character"],
)
def test_tokens_without_text_cost_no_more_the_more_there_are(silent: int, before: list[int], after: list[int]) -> None:
    counting = Counting(FALLBACK)
    detokenizer = Detokenizer(counting)
    ids = [*before, *[silent] * 4000, *after]
    out = "".join(detokenizer.feed([i]) for i in ids) + detokenizer.flush()
    assert counting.work < 20 * len(ids)
    assert out == FALLBACK.decode([*before, *after])


def test_silent_tokens_that_may_matter_are_bounded_too() -> None:
    class Silent:
        work = 0

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            self.work += len(ids)
            return "x" if len(set(ids)) < len(ids) else ""  # no token is void, and different ones never show

    silent = Silent()
    Detokenizer(silent).feed(range(4000))
    assert silent.work < 4000 * 100


def test_invalid_bytes_do_not_hold_back_for_ever() -> None:
    detokenizer = Detokenizer(Bytes())
    out = detokenizer.feed([0xFF] * 20)
    assert len(out) >= 17
    assert out + detokenizer.feed(b"ok") + detokenizer.flush() == "�" * 20 + "ok"
    cut = Detokenizer(Bytes())
    assert cut.feed("é🎉".encode()[:-1]) + cut.flush() == "é�"


@given(st.text(max_size=12))
def test_any_text_comes_out_as_it_is(text: str) -> None:
    detokenizer = Detokenizer(Bytes())
    assert "".join(detokenizer.feed([b]) for b in text.encode()) + detokenizer.flush() == text


@given(st.lists(st.one_of(st.sampled_from(list("né🎉你".encode())), st.integers(0, 255)), max_size=30))
def test_broken_bytes_lose_no_character(data: list[int]) -> None:
    for tokenizer, ids in ((Bytes(), data), (FALLBACK, [5 + b for b in data])):
        detokenizer = Detokenizer(tokenizer)
        out = "".join(detokenizer.feed([i]) for i in ids) + detokenizer.flush()
        if tokenizer is not FALLBACK:  # whose decoding of everything shows one broken byte as a broken run
            assert out.replace("�", "") == tokenizer.decode(ids).replace("�", "")
        elif "�" not in tokenizer.decode(ids):
            assert out == tokenizer.decode(ids)


def test_byte_level_bpe_of_the_tokenizers_library() -> None:
    text = "🎉 你好 naïve"
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()

    class Wrapped:
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            return backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    detokenizer = Detokenizer(Wrapped())
    assert "".join(detokenizer.feed([i]) for i in backend.encode(text).ids) + detokenizer.flush() == text


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    checker = StopChecker(stops, include=include)
    longest = max(map(len, stops), default=1)
    out = []
    for piece in pieces:
        stopped = checker.feed(piece)
        out.append(stopped.text)
        if stopped.match is not None:
            return out, stopped.match
        assert len(checker.held) <= longest - 1
    return [*out, checker.flush()], None


def test_stop_across_tokens() -> None:
    pieces = ["abc", "DEF", "G", "HI", "J", "k"]
    assert run(["DEFGHIJ"], pieces) == (["abc", "", "", "", ""], "DEFGHIJ")
    assert run(["DEFGHIJ"], pieces, include=True) == (["abc", "", "", "", "DEFGHIJ"], "DEFGHIJ")


def test_near_miss_arrives_in_full_and_in_order() -> None:
    out, match = run(["DEFGHIJ"], ["DEF", "G", "H", "X"])
    assert (out, match) == (["", "", "", "DEFGHX", ""], None)
    assert run(["aab"], ["a", "a", "a", "b", "c"]) == (["", "", "a", ""], "aab")


def test_stop_that_begins_another_stop() -> None:
    for pieces in (["xab", "cd"], list("xabcd"), ["xabcd"]):
        out, match = run(["abc", "ab"], pieces)
        assert ("".join(out), match) == ("x", "ab")


def test_stops_that_end_together_the_longer_wins() -> None:
    for pieces in (["xabcd"], list("xabcd")):
        out, match = run(["bc", "abc"], pieces)
        assert ("".join(out), match) == ("x", "abc")


def test_held_text_is_flushed_at_the_end() -> None:
    assert run(["DEFG"], ["abcDE"]) == (["abc", "DE"], None)
    assert run([], ["abc"]) == (["abc", ""], None)


def test_first_piece_may_be_the_stop() -> None:
    assert run(["\n"], ["\n"]) == ([""], "\n")


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.integers(0, 999))
def test_result_does_not_depend_on_the_pieces(text: str, stops: list[str], seed: int) -> None:
    rng = random.Random(seed)
    pieces, rest = [], text
    while rest:
        size = rng.randint(1, len(rest))
        pieces.append(rest[:size])
        rest = rest[size:]
    whole, match = run(stops, [text])
    cut, cut_match = run(stops, pieces)
    assert ("".join(whole), match) == ("".join(cut), cut_match)
    if match is None:
        assert "".join(whole) == text
    else:
        assert not any(stop in "".join(whole) for stop in stops)
