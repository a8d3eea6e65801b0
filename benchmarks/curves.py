"""Curves over steps as a small SVG file, without a plotting library."""

_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#9c6b4e")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 400, 50, 40, 90, 40


def draw(title: str, curves: dict[str, list[float]]) -> str:
    """An SVG document: values between 0 and 1 over steps from 1, one line and one legend entry per curve."""
    lowest = min(0.1 * int(10 * min(values)) for values in curves.values())
    num_steps = max(len(values) for values in curves.values())

    def x(step: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - 1) / max(num_steps - 1, 1)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value) / (1 - lowest)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{title}</text>',
    ]
    for tenth in range(round(10 * lowest), 11):
        at = y(tenth / 10)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    for step in (1, *range(5, num_steps + 1, 5)):
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>')
    for number, (name, values) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(values, start=1))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = _TOP + 18 * (number + 1)
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 10}" y="{at - 8}" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 28}" y="{at}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
