"""CSV formats: Azure, BurstGPT, Vidur, tables of lengths, and LLMServingSim's table of a vLLM run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from octavo.planner.traces.fields import Calendar, FieldError, cell_seconds, cell_tokens, text
from octavo.planner.traces.file_trace import Format
from octavo.planner.traces.lines import Head, Row, Rows, read_table

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
VIDUR_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
LENGTH_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")
RUN_COLUMNS = ("id", "input_toks", "output_toks", "queued_s")
NO_TIME = "XXX"  # what Nanoflow's tables have in place of a timestamp


class AzureRow:
    """Cells of AZURE_COLUMNS to a row; one for each reading of a file. Raises FieldError."""

    def __init__(self) -> None:
        self._when = Calendar("TIMESTAMP")

    def __call__(self, cells: Sequence[str], number: int) -> Row:
        stamp, prompt, output = cells
        return Row(
            self._when(stamp), cell_tokens(prompt, "ContextTokens"), cell_tokens(output, "GeneratedTokens"), str(number)
        )


def read_azure(path: Path) -> Rows:
    """Azure LLM inference traces (2023: no zone, taken as UTC, 7 digits, CRLF, no last newline; 2024: +00:00)."""
    return read_table(path, AZURE_COLUMNS, AzureRow())


def read_untimed_azure(path: Path) -> Rows:
    """Nanoflow's tables: Azure's columns, but the timestamp is always XXX."""

    def row(cells: Sequence[str], number: int) -> Row:
        return Row(0.0, cell_tokens(cells[1], AZURE_COLUMNS[1]), cell_tokens(cells[2], AZURE_COLUMNS[2]), str(number))

    return read_table(path, AZURE_COLUMNS, row)


def read_burst(path: Path) -> Rows:
    """BurstGPT: seconds after the midnight of day 1, local time. Columns are found by name: newer releases add some.

    A failed request has Response tokens 0, so it is left out as a bad line: it held no KV that anybody measured.
    """

    def row(cells: Sequence[str], number: int) -> Row:
        if cells[2].strip() in ("0", "0.0"):
            raise FieldError("Response tokens is 0: the request failed.")
        return Row(
            cell_seconds(cells[0], BURST_COLUMNS[0]),
            cell_tokens(cells[1], BURST_COLUMNS[1]),
            cell_tokens(cells[2], BURST_COLUMNS[2]),
            str(number),
            session=cells[3].strip() if len(cells) > 3 else "",
        )

    return read_table(path, BURST_COLUMNS, row, optional="Session ID")


def read_vidur(path: Path) -> Rows:
    """Vidur's processed traces: seconds after the first request."""

    def row(cells: Sequence[str], number: int) -> Row:
        when, prompt, output = cells
        return Row(
            cell_seconds(when, "arrived_at"),
            cell_tokens(prompt, LENGTH_COLUMNS[0]),
            cell_tokens(output, LENGTH_COLUMNS[1]),
            str(number),
        )

    return read_table(path, VIDUR_COLUMNS, row)


def read_lengths(path: Path) -> Rows:
    """Tables of lengths without times: Vidur's arXiv table, Sarathi-Serve's ShareGPT table."""

    def row(cells: Sequence[str], number: int) -> Row:
        return Row(0.0, cell_tokens(cells[0], LENGTH_COLUMNS[0]), cell_tokens(cells[1], LENGTH_COLUMNS[1]), str(number))

    return read_table(path, LENGTH_COLUMNS, row)


def read_run(path: Path) -> Rows:
    """requests.csv of a measured vLLM run (LLMServingSim): arrival is `queued_s`, when the engine queued it."""

    def row(cells: Sequence[str], number: int) -> Row:
        name, prompt, output, queued = cells
        return Row(
            cell_seconds(queued, "queued_s"),
            cell_tokens(prompt, "input_toks"),
            cell_tokens(output, "output_toks"),
            text(name, "id"),
        )

    return read_table(path, RUN_COLUMNS, row)


def _has_columns(columns: tuple[str, ...], head: Head) -> bool:
    return set(columns) <= set(head.columns)


def _has(*columns: str) -> Callable[[Head], bool]:
    return partial(_has_columns, columns)  # no closure: traces travel to worker processes


def _is_untimed(head: Head) -> bool:
    return _has(*AZURE_COLUMNS)(head) and NO_TIME in head.first


FORMATS = (
    Format("azure-lengths", "Azure's columns with XXX for times (Nanoflow)", _is_untimed, read_untimed_azure, False),
    Format("azure", "Azure LLM inference CSV", _has(*AZURE_COLUMNS), read_azure),
    Format("burstgpt", "BurstGPT CSV", _has(*BURST_COLUMNS), read_burst),
    Format("vidur", "Vidur CSV with arrived_at", _has(*VIDUR_COLUMNS), read_vidur),
    Format("lengths", "CSV of num_prefill_tokens, num_decode_tokens", _has(*LENGTH_COLUMNS), read_lengths, False),
    Format("vllm-run", "requests.csv of a measured vLLM run", _has(*RUN_COLUMNS), read_run),
)
