"""Line charts as SVG text: few series, axes with given marks, a legend. No library needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 210, 50, 60
_COLOURS = ("#1b6ca8", "#c0392b", "#1e8449", "#7d3c98", "#b9770e", "#34495e")


@dataclass(frozen=True)
class Series:
    """Points in ascending x; `dashed` for what is computed instead of measured."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """From the first mark to the last; (place, text) each. `log` spaces factors evenly."""

    title: str
    marks: Sequence[tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value stands between the ends, 0 to 1."""
        low, high = self.marks[0][0], self.marks[-1][0]
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / (high - low)


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series], note: str = "") -> str:
    """The whole SVG file."""
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def at(px: float, py: float) -> tuple[float, float]:
        across, up = x.share(px), y.share(py)
        return _LEFT + across * (right - _LEFT), bottom - up * (bottom - _TOP)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 24, title, 'font-size="15"'),
        _text(_LEFT, 41, note, 'fill="#666"'),
    ]
    for place, text in x.marks:
        px, _ = at(place, y.marks[0][0])
        lines.append(_line(px, _TOP, px, bottom, "#eee"))
        lines.append(_text(px, bottom + 18, text, 'text-anchor="middle"'))
    for place, text in y.marks:
        _, py = at(x.marks[0][0], place)
        lines.append(_line(_LEFT, py, right, py, "#eee"))
        lines.append(_text(_LEFT - 8, py + 4, text, 'text-anchor="end"'))
    lines.append(_text((_LEFT + right) / 2, HEIGHT - 16, x.title, 'text-anchor="middle"'))
    lines.append(
        _text(0, 0, y.title, f'text-anchor="middle" transform="translate(18 {bottom / 2 + 25}) '
        'rotate(-90)"')
    )  # fmt: skip
    for number, one in enumerate(series):
        colour = _COLOURS[one.colour % len(_COLOURS)]
        style = f'stroke="{colour}" stroke-width="2"' + ' stroke-dasharray="5 4"' * one.dashed
        places = [at(px, py) for px, py in one.points]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        lines.append(f'<polyline points="{path}" fill="none" {style}/>')
        if not one.dashed:
            lines += [
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places
            ]
        key = _TOP + 8 + 20 * number
        lines.append(_line(right + 14, key, right + 40, key, "", style))
        lines.append(_text(right + 46, key + 4, one.name))
    return "\n".join([*lines, "</svg>"]) + "\n"


def even_marks(top: float, count: int = 6) -> list[tuple[float, str]]:
    """From 0 to a round number above `top`."""
    step = top / (count - 1)
    scale = 10.0 ** math.floor(math.log10(step))
    step = next(s * scale for s in (1, 2, 2.5, 5, 10) if s * scale >= step)
    return [(i * step, f"{i * step:g}") for i in range(math.ceil(top / step) + 1)]


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _line(x0: float, y0: float, x1: float, y1: float, colour: str, style: str = "") -> str:
    style = style or f'stroke="{colour}"'
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" {style}/>'
