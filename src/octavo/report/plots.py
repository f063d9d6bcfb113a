"""Plots as SVG text that needs no script: lines over a few numbered places, and bars of parts with a mark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 14, 40
BAR_WIDTH, BAR_LEFT, BAR_RIGHT, BAR_HEIGHT, BAR_STEP = 1160, 210, 130, 20, 32
Format = Callable[[float], str]
Place = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot; `colour` names a CSS variable, None is a gap."""

    name: str
    colour: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: (name, colour, value) of its parts from left to right, and the value at which a mark stands."""

    label: str
    parts: Sequence[tuple[str, str, float]]
    mark: float
    note: str


def ticks(most: float, wanted: int = 5) -> list[float]:
    """0 and round steps of 1, 2 or 5 times a power of ten, up to the first that is not below `most`."""
    rough = max(most, 1e-12) / wanted
    power = 10 ** floor(log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999999)
    return [i * step for i in range(ceil(most / step * 0.999999) + 1)] if most > 0 else [0.0, step]


def line_plot(places: Sequence[str], lines: Sequence[Line], under: str, show: Format) -> str:
    """Lines over equally spaced places, from 0; `under`: what the places are."""
    scale = ticks(max((v for line in lines for v in line.values if v is not None), default=1.0))
    inner, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(i: int) -> float:
        return LEFT + inner * (i + 0.5) / max(1, len(places))

    def y(value: float) -> float:
        return TOP + height * (1 - value / scale[-1])

    out = [f'<rect class="ground" x="{LEFT}" y="{TOP}" width="{inner}" height="{height}"/>']
    for value in scale:
        out.append(f'<line class="tick" x1="{LEFT}" x2="{LEFT + inner}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{escape(show(value))}</text>')
    for i, place in enumerate(places):
        out.append(f'<text x="{x(i):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{escape(place)}</text>')
    out.append(f'<text x="{LEFT + inner}" y="{HEIGHT - 7}" text-anchor="end">{escape(under)}</text>')
    for line in lines:
        out += _line(line, places, x, y, show)
    words = escape(", ".join(line.name for line in lines))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">{"".join(out)}</svg>'


def _line(line: Line, places: Sequence[str], x: Callable[[int], float], y: Place, show: Format) -> list[str]:
    there = [(i, value) for i, value in enumerate(line.values) if value is not None]
    path = "L".join(f"{x(i):.1f} {y(value):.1f}" for i, value in there)
    out = [f'<path class="line" d="M{path}" style="stroke:var({line.colour})"/>'] if len(there) > 1 else []
    for i, value in there:
        title = escape(f"{line.name} at {places[i]}: {show(value)}")
        out.append(
            f'<circle class="dot" cx="{x(i):.1f}" cy="{y(value):.1f}" r="4" style="fill:var({line.colour})">'
            f"<title>{title}</title></circle>"
        )
    return out


def bar_plot(bars: Sequence[Bar], show: Format) -> str:
    """Bars of parts, one under the other, on one scale from 0."""
    scale = ticks(max((sum(part[2] for part in bar.parts) for bar in bars), default=1.0), 8)
    inner = BAR_WIDTH - BAR_LEFT - BAR_RIGHT
    bottom = len(bars) * BAR_STEP + 6

    def x(value: float) -> float:
        return BAR_LEFT + inner * value / scale[-1]

    out = []
    for value in scale:
        out.append(f'<line class="tick" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="0" y2="{bottom}"/>')
        out.append(f'<text x="{x(value):.1f}" y="{bottom + 15}" text-anchor="middle">{escape(show(value))}</text>')
    for i, bar in enumerate(bars):
        out += _bar(bar, i * BAR_STEP + 6, x, show)
    return f'<svg viewBox="0 0 {BAR_WIDTH} {bottom + 22}" role="img" aria-label="Steps by part">{"".join(out)}</svg>'


def _bar(bar: Bar, top: float, x: Place, show: Format) -> list[str]:
    middle = top + BAR_HEIGHT / 2 + 4
    out = [f'<text class="strong" x="{BAR_LEFT - 8}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>']
    at = 0.0
    for name, colour, value in bar.parts:
        if value > 0:
            out.append(
                f'<rect x="{x(at):.2f}" y="{top}" width="{x(at + value) - x(at):.2f}" height="{BAR_HEIGHT}" '
                f'style="fill:var({colour})"><title>{escape(f"{name}: {show(value)}")}</title></rect>'
            )
            at += value
    out.append(f'<text x="{x(max(at, bar.mark)) + 7:.1f}" y="{middle}">{escape(bar.note)}</text>')
    place = f'x1="{x(bar.mark):.1f}" x2="{x(bar.mark):.1f}" y1="{top - 4}" y2="{top + BAR_HEIGHT + 4}"'
    out.append(f'<line class="floor" {place}><title>{escape(f"floor: {show(bar.mark)}")}</title></line>')
    return out
