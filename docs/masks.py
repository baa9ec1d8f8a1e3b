"""Draws `docs/masks.png`, the gallery of masks in the README.

python -m docs.masks
"""

import hashlib
import math
import pathlib

import numpy as np
from matplotlib.figure import Figure

from attn_jax import masks

LENGTH, TILE = 64, (8, 8)
GALLERY = {
    "Causal()": masks.Causal(),
    "SlidingWindow(16)": masks.SlidingWindow(16),
    "LocalWindow(8, 8)": masks.LocalWindow(8, 8),
    "Dilated(6, 6, dilation=3)": masks.Dilated(6, 6, dilation=3),
    "BlockDiagonal(16)": masks.BlockDiagonal(16),
    "PrefixLM(20)": masks.PrefixLM(20),
    "documents(ids)": masks.documents(np.repeat(np.arange(4), (12, 22, 8, 22))),
    "sparse_transformer(8)": masks.sparse_transformer(8),
    "GlobalTokens(8)": masks.GlobalTokens(8),
    "longformer(6, 8)": masks.longformer(6, 8),
    "RandomBlocks(0, 2, 8)": masks.RandomBlocks(0, per_row=2, block=8),
    "bigbird(6, 8, per_row=1, block=8)": masks.bigbird(6, 8, per_row=1, block=8),
}
FILE = pathlib.Path(__file__).with_name("masks.png")


def images() -> dict[str, np.ndarray]:
    """The picture of each mask, `[64, 64, 3]`."""
    return {title: masks.to_image(mask, LENGTH, tile=TILE) for title, mask in GALLERY.items()}


def digest() -> str:
    """What the gallery shows, as a number that its file carries."""
    shown = [title.encode() + image.tobytes() for title, image in images().items()]
    return hashlib.sha256(b"".join(shown)).hexdigest()


def draw(path: pathlib.Path = FILE) -> None:
    """Writes the gallery: the same bytes wherever matplotlib is the same."""
    columns = 4
    rows = math.ceil(len(GALLERY) / columns)
    figure = Figure(figsize=(2.5 * columns, 2.95 * rows), dpi=100, layout="constrained")
    for axes, (title, image) in zip(figure.subplots(rows, columns).flat, images().items(), strict=False):
        counts = masks.count_tiles(GALLERY[title], LENGTH, tile=TILE)
        axes.imshow(image, interpolation="nearest", extent=(0, LENGTH, LENGTH, 0))
        axes.set_title(title, fontsize=8.5, family="monospace")
        axes.set_xlabel(f"{counts.empty} empty, {counts.mixed} mixed, {counts.full} full", fontsize=8)
        axes.set_xticks(range(0, LENGTH + 1, TILE[1]), labels=[])
        axes.set_yticks(range(0, LENGTH + 1, TILE[0]), labels=[])
        axes.grid(visible=True, color="#00000022", linewidth=0.5)
        axes.tick_params(length=0)
    figure.savefig(path, metadata={"Software": None, "Description": digest()})


if __name__ == "__main__":
    draw()
