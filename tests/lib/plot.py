"""Draw points and lines in panels: an SVG for light and dark pages, wide and narrow ones."""

import math
from html import escape

WIDTH, HEIGHT, LEFT, GAP = 830, 270, 66, 16                # HEIGHT: of the axes; LEFT: its numbers
FONT = 16, 25                                              # on a wide page, and on a narrow one
SHAPES = (  # circle, square, diamond, triangle, hexagon, cross: colours alone do not suffice
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0z", "M-.9-.9H.9V.9H-.9z", "M0-1.3 1.3 0 0 1.3-1.3 0z",
    "M0-1.2 1.2 .9H-1.2z", "M-1.1 0-.5-.9H.5L1.1 0 .5 .9H-.5z",
    "M-1.1-.4H-.4V-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1z")
LIGHT = "#0969da #bc4c00 #1a7f37 #8250df #bf3989 #9a6700 #0e7c86 #57606a".split()
DARK = "#58a6ff #f0883e #3fb950 #bc8cff #f778ba #d29922 #39c5cf #8b949e".split()
STYLE = """
text { font: %dpx -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.back { fill: #fff } .grid { stroke: #d0d7de } .dot { opacity: .5 } .title { font-weight: 600 }
.line { fill: none; stroke: currentColor; stroke-width: 2 } .mark { fill: currentColor }
.thin { stroke-width: 1 }
@media (max-width: 560px) { text { font-size: %dpx } }
%s
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .back { fill: #0d1117 }
.grid { stroke: #30363d } .dot { opacity: .7 }
%s }
""" % (*FONT, *(" ".join(f".c{i} {{ color: {colour} }}" for i, colour in enumerate(colours))
                for colours in (LIGHT, DARK)))


def round_values(low, high, most):
    """Return at most `most` round values from low to high, to mark on an axis."""
    smallest = math.floor(math.log10(high - low)) - 1
    steps = (a * 10.0 ** e for e in range(smallest, smallest + 4) for a in (1, 2, 5))
    step = next(step for step in steps if (high - low) / step <= most - 1)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def limits(points, axis):
    """Return the ends of the x axis (0) or of the y axis (1), with a margin."""
    values = [point[axis] for point in points]
    low, high = min(values), max(values)
    more = 0.06 * (high - low) or 0.1 * abs(high) or 1
    return low - more, high + more


def text(x, y, words, cls="", anchor="middle"):
    return (f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f'{escape(words)}</text>')


def mark(i, x, y, size, cls=""):
    """Return the mark of label i."""
    return (f'<path class="mark c{i % len(LIGHT)} {cls}" d="{SHAPES[i % len(SHAPES)]}" '
            f'transform="translate({x:.2f} {y:.2f}) scale({size})"/>')


def legend(labels):
    """Return the labels with their marks, in columns of one width, and the height of the rows."""
    parts, widest = [], 44 + 0.53 * FONT[1] * max(map(len, labels))
    columns = max(1, int(WIDTH / widest))
    for i, label in enumerate(labels):
        x, y = WIDTH / columns * (i % columns), 26 + 34 * (i // columns)
        parts += [mark(i, x + 18, y - 6, 6), text(x + 32, y, label, anchor="start")]
    return parts, y + 8


def draw_panel(panel, labels, box, ends):
    """Return a panel. box: left, top, right and bottom of its axes in pixels. ends: the first and
    the last value of each axis."""
    left, top, right, bottom = box
    (x0, x1), (y0, y1) = ends

    def x_of(x):
        return left + (x - x0) / (x1 - x0) * (right - left)

    def y_of(y):
        return bottom + (y - y0) / (y1 - y0) * (top - bottom)
    parts = [text(left, top - 12, panel["title"], "title", "start")]
    for x in round_values(x0, x1, 6) if panel["x"] else ():
        parts += [f'<path class="grid" d="M{x_of(x):.1f} {top}V{bottom}"/>',
                  text(x_of(x), bottom + 25, f"{x:.9g}")]
    for y in round_values(y0, y1, 8):
        parts.append(f'<path class="grid" d="M{left:.1f} {y_of(y):.1f}H{right:.1f}"/>')
        parts.append(text(left - 8, y_of(y) + 6, f"{y:.9g}", anchor="end"))
    for label, kind, points in panel["series"]:
        i = labels.index(label)
        places = [(x_of(x), y_of(y)) for x, y in points]
        if kind in ("line", "thin"):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="{kind} line c{i % len(LIGHT)}" points="{path}"/>')
        size = {"line": 3.5, "thin": 2, "dot": 4, "mean": 8}[kind]
        every = max(1, len(places) // 20) if kind == "line" else 1     # more would cover the line
        marked = places[(len(places) - 1) % every::every]              # the last is always marked
        parts += [mark(i, x, y, size, "dot" * (kind == "dot")) for x, y in marked]
    return parts


def draw(path, panels, per_row=3):
    """Write panels to an SVG file, below a legend. A panel is a dict: `title`, which says what y
    is; `x`, the name of its axis ("": no numbers); `series`, a list of (label, kind, points). The
    kind is "line", "thin" (a line), "dot" or "mean" (a large dot). A point is (x, y)."""
    labels = [*dict.fromkeys(label for panel in panels for label, *_ in panel["series"])]
    points = [sum((found for *_, found in panel["series"]), []) for panel in panels]
    ends = [[limits(found, axis) for axis in (0, 1)] for found in points]
    parts, y = legend(labels)
    for start in range(0, len(panels), per_row):
        row, left = panels[start:start + per_row], 0.0
        width, top = WIDTH / len(row) - LEFT - GAP, y + 40
        names = {panel["x"] for panel in row}              # one name for the row, if all have it
        for panel, its_ends in zip(row, ends[start:]):
            box = left + LEFT, top, left + LEFT + width, top + HEIGHT
            parts += draw_panel(panel, labels, box, its_ends)
            if len(names) > 1:
                parts.append(text((box[0] + box[2]) / 2, top + HEIGHT + 54, panel["x"]))
            left = box[2] + GAP
        if len(names) == 1:
            parts.append(text((LEFT + WIDTH) / 2, top + HEIGHT + 54, *names))
        y = top + HEIGHT + (62 if any(names) else 10)
    path.write_text("\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {y + 6}">',
        f'<style>{STYLE}</style><rect class="back" width="100%" height="100%" rx="6"/>',
        *parts, "</svg>\n"]), encoding="utf-8")


def draw_bars(path, rows, columns):
    """Write an SVG file with a panel of bars for each of `columns` {title: unit}, and a row for each
    of `rows`: {label: {column: a signed number as text, bold (**-0.3**) or not}}. Bars of bold
    numbers are full, others pale. A panel ends at the fourth largest number; bars that
    reach its end show their number, and longer ones are cut off."""
    left, height, width = 330, 34, (WIDTH - 330) / len(columns)
    parts, y = [], 50
    values = {column: {label: float(found[column].strip("*")) for label, found in rows.items()
                       if column in found} for column in columns}
    for label in rows:
        y += height
        parts.append(text(left - 12, y, label, anchor="end"))
    for i, (column, unit) in enumerate(columns.items()):
        zero, size = left + width * (i + 0.5), width / 2 - 10
        most = sorted(map(abs, values[column].values()))[-4:][0] or 1
        parts += [text(zero, 30, column, "title"),
                  f'<path class="grid" d="M{zero:.1f} 48V{y + 12}"/>',
                  text(zero, y + 44, f"\u00b1{most:g} {unit}")]
        for j, (label, value) in enumerate((x, values[column].get(x)) for x in rows):
            if value is None:
                continue
            length, sign = size * min(1, abs(value) / most), 1 if value > 0 else -1
            pale = "" if "*" in rows[label][column] else " dot"
            middle = 50 + height * (j + 1) - 7
            parts.append(f'<path class="bar c{int(value < 0)}{pale}" d="M{zero:.1f} {middle}h'
                         f'{sign * length:.1f}"/>')
            if abs(value) >= most:
                number = rows[label][column].strip("*")
                parts.append(text(zero - sign * size / 2, middle + 7, number))
    style = STYLE + ".bar { stroke: currentColor; stroke-width: 20 }"
    path.write_text("\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {y + 60}">',
        f'<style>{style}</style><rect class="back" width="100%" height="100%" rx="6"/>',
        *parts, "</svg>\n"]), encoding="utf-8")


def as_table(rows):
    """Format rows, dicts with the same keys, as aligned columns."""
    rows = [rows[0].keys(), *(row.values() for row in rows)]
    rows = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)
