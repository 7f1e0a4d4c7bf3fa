"""The picture of docs/overlapped_optimizer.md: two measured steps of the overlapped distributed optimizer on shaped links.

    sudo python benchmarks/overlap_picture.py [--mbit N] [--micro-batches N] [--out FILE]      (SVG)

Four ranks as in overlap.py; rank 0 is drawn: the layers of forward and backward, the reductions of buckets, the gatherings of
parameters, each where it began and ended.
"""

import argparse
import sys
import tempfile
from pathlib import Path

if __package__:
    from benchmarks import overlap
    from benchmarks.overlap_net import Network
    from benchmarks.train_vs_hf import machine
else:  # run as a file
    import overlap
    from overlap_net import Network
    from train_vs_hf import machine

LANES = {"forward": ("compute", "#8fb8de"), "backward": ("compute", "#2f6da8"), "reduce": ("reductions", "#d9822b"),
         "gather": ("gathering", "#4f9d69")}
WIDTH, LEFT, LANE, TOP = 960, 96, 34, 26


def rows(found: list) -> list[tuple]:
    """(what, begin, end, row) with rows such that nothing of a lane overlaps."""
    ends, out = {}, []
    for what, begin, end in sorted(found, key=lambda one: one[1]):
        if what in LANES:
            lane = ends.setdefault(LANES[what][0], [])
            row = next((number for number, until in enumerate(lane) if until <= begin + 1e-4), len(lane))
            lane[row:row + 1] = [end]
            out.append((what, begin, end, row))
    return out


def draw(found: list, caption: str) -> str:
    """SVG of ``found``, [what, begin, end] in seconds."""
    total = max(end for _, _, end in found)
    placed, names = rows(found), list(dict.fromkeys(lane for lane, _ in LANES.values()))
    scale, tops, top = (WIDTH - LEFT - 10) / total, {}, TOP
    out = []
    for name in names:
        deepest = 1 + max((row for what, _, _, row in placed if LANES[what][0] == name), default=0)
        tops[name] = (top, (LANE - 6) / deepest)
        out.append(f'<text x="8" y="{top + 18}">{name}</text>')
        top += LANE
    for what, begin, end, row in placed:
        at, height = tops[LANES[what][0]]
        out.append(f'<rect x="{LEFT + max(begin, 0) * scale:.1f}" y="{at + row * height:.1f}" '
                   f'width="{max((end - max(begin, 0)) * scale - 0.5, 0.8):.1f}" height="{height - 0.5:.1f}" fill="{LANES[what][1]}"/>')
    for number, (_, begin, end) in enumerate(sorted(one for one in found if one[0] == "step")):
        out.append(f'<text x="{LEFT + begin * scale:.1f}" y="16">step {number + 1}, {(end - begin) * 1000:.0f} ms</text>')
        out.append(f'<line x1="{LEFT + begin * scale:.1f}" x2="{LEFT + begin * scale:.1f}" y1="20" y2="{top}" stroke="#888"/>')
    out.append(f'<text x="8" y="{top + 16}">{caption}</text>')
    style = "text{font:12px sans-serif;fill:#333}"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 26}"><style>{style}</style>'
            f'<rect width="100%" height="100%" fill="white"/>' + "\n".join(out) + "</svg>\n")


def main(argv=None) -> int:
    """Run, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=150, help="rate of every link")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--out", type=Path, default=overlap.ROOT / "docs/overlapped_optimizer.svg")
    options, about = parser.parse_args(argv), machine()
    scenario = overlap.Scenario(options.micro_batches, "", 0, 0.03)
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder, Network(overlap.RANKS, options.mbit) as network:
        cluster = overlap.Cluster(network, overlap.save_model(folder), ("ours",), scenario, folder)
        try:
            cluster.run("ours", 2)
            found = cluster.tell("ours", "timeline")[0]["answer"]
        finally:
            cluster.close()
    caption = (f"dark blue: backward, light blue: forward. {cluster.parameters / 1e6:.1f}M parameters in {cluster.buckets} buckets, "
               f"{overlap.RANKS} ranks, {options.micro_batches} micro-batches, {options.mbit:.0f} Mbit/s, {about['date'][:10]}")
    options.out.write_text(draw(found, caption), encoding="utf-8")
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
