"""Counts of tiles and pictures: what they show is what the mask says."""

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import PIL.Image
import pytest

from attn_jax import biases, masks
from attn_jax.masks import TileCounts, count_tiles, materialize, to_image
from docs import masks as gallery

WHITE, BLUE = (255, 255, 255), (0, 114, 178)


@pytest.mark.parametrize(
    ("mask", "lengths", "tile", "counts"),
    [
        (masks.Causal(), (6,), (2, 2), TileCounts(empty=3, mixed=3, full=3)),
        (masks.Causal(), (7,), (2, 3), TileCounts(empty=3, mixed=5, full=4)),
        (masks.Causal(), (4, 6), (2, 2), TileCounts(empty=3, mixed=2, full=1)),
        (masks.SlidingWindow(1), (5,), (1, 1), TileCounts(empty=20, mixed=0, full=5)),
        (masks.BlockDiagonal(4), (16,), (4, 4), TileCounts(empty=12, mixed=0, full=4)),
        (masks.LocalWindow(None, None), (5,), (2, 2), TileCounts(empty=0, mixed=0, full=9)),
        (masks.Causal(), (1,), (512, 512), TileCounts(empty=0, mixed=0, full=1)),
        (masks.Causal(), (0,), (2, 2), TileCounts(empty=0, mixed=0, full=0)),
        (masks.Causal(), (0, 5), (2, 2), TileCounts(empty=0, mixed=0, full=0)),
        (masks.Padding(np.array(3)), (6,), (2, 2), TileCounts(empty=3, mixed=3, full=3)),
        (masks.documents(np.array([0, 0, 1, 1])), (4,), (2, 2), TileCounts(empty=2, mixed=2, full=0)),
        (np.eye(4, dtype=bool), (4,), (2, 2), TileCounts(empty=2, mixed=2, full=0)),
    ],
)  # fmt: skip
def test_count_tiles(mask, lengths, tile, counts):
    assert count_tiles(mask, *lengths, tile=tile) == counts


def test_count_tiles_of_a_long_sequence():
    """A square of 2^40 entries, of which only tiles are looked at."""
    empty, mixed, full = count_tiles(masks.Causal(), 2**20, tile=(1024, 1024))
    assert (empty, mixed, full) == (1024 * 1023 // 2, 1024, 1024 * 1023 // 2)


def test_counting_inside_a_trace():
    @jax.jit
    def scaled(x):
        counts = count_tiles(masks.Causal() & masks.Padding(np.array(3)), 4, tile=(2, 2))
        assert counts == (1, 2, 1)
        assert to_image(masks.documents(np.array([0, 0, 1, 1])), 4).shape == (4, 4, 3)
        return counts.mixed * x

    assert scaled(2.0) == 4.0


def test_image_of_entries():
    image = to_image(masks.Causal(), 2, 3)
    assert image.dtype == np.uint8
    hidden, visible = (242, 242, 242), BLUE
    assert [[tuple(pixel) for pixel in row] for row in image.tolist()] == [
        [visible, hidden, hidden],
        [visible, visible, hidden],
    ]


@pytest.mark.parametrize("tile", [(4, 4), (3, 5), (20, 30)])
def test_image_of_tiles(tile):
    """Blue where full, white where empty, two shades of orange where mixed."""
    mask = masks.longformer(2, 3)
    image, visible = to_image(mask, 13, 11, tile=tile), np.asarray(materialize(mask, 13, 11))
    colours = {WHITE: False, (252, 228, 190): False, (213, 94, 0): True, BLUE: True}
    assert [[colours[tuple(pixel)] for pixel in row] for row in image.tolist()] == visible.tolist()
    seen = {tuple(pixel) for row in image.tolist() for pixel in row}
    counts = count_tiles(mask, 13, 11, tile=tile)
    assert (WHITE in seen, BLUE in seen) == (counts.empty > 0, counts.full > 0)


def test_image_of_nothing():
    assert to_image(masks.Causal(), 0, 5).shape == (0, 5, 3)
    assert to_image(masks.Causal(), 5, 0, tile=(2, 2)).shape == (5, 0, 3)


def test_image_is_what_matplotlib_writes(tmp_path):
    image = to_image(masks.bigbird(2, 4, per_row=1, block=4), 32, tile=(4, 4))
    matplotlib.image.imsave(tmp_path / "mask.png", image)
    read = matplotlib.image.imread(tmp_path / "mask.png")[..., :3]
    np.testing.assert_array_equal(np.round(read * 255).astype(np.uint8), image)


@pytest.mark.parametrize("look", [count_tiles, to_image])
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((masks.Causal(), -1), {}, "query_length must be at least 0, got -1"),
        ((masks.Causal(), 4, 2.0), {}, "key_length must be an integer, got float 2.0"),
        ((masks.Causal(), 4), {"tile": 512}, r"tile must be \(queries, keys\), got 512"),
        ((masks.Causal(), 4), {"tile": (1, 2, 3)}, r"tile must be \(queries, keys\), got \(1, 2, 3\)"),
        ((masks.Causal(), 4), {"tile": (0, 2)}, "tile must be at least 1, got 0"),
        ((masks.Causal(), 4), {"tile": (2, -1)}, "tile must be at least 1, got -1"),
        ((masks.Causal(), 4), {"tile": (2, 2.5)}, "tile must be an integer, got float 2.5"),
        ((np.ones((3, 4), bool), 4), {}, r"mask must broadcast to .* = \(1, 4, 4\), got shape \(1, 3, 4\)"),
        ((masks.Segments(np.zeros(3, int)), 4), {}, r"query_ids must have shape .* = \(4,\), got \(3,\)"),
        ((masks.documents(np.zeros(4, int)), 4, 5), {}, r"key_ids must have shape .* = \(5,\), got \(4,\)"),
        ((masks.Padding(np.array([3, 4])), 4), {}, r"lengths must have shape \[\] or \[\*B\] = \(\), got \(2,\)"),
        ((np.ones((2, 4, 4), bool), 4), {}, r"mask must broadcast to .* = \(1, 4, 4\)"),
        ((np.ones((4, 4)), 4), {}, "mask must be boolean"),
        ((biases.Alibi(1), 4), {}, "mask must be a mask, got the attn_jax.biases.Alibi"),
    ],
)  # fmt: skip
def test_bad_arguments(look, arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        look(*arguments, **({"tile": (2, 2)} | options))


@pytest.mark.parametrize("look", [count_tiles, to_image])
def test_a_traced_mask_is_refused(look):
    def call(lengths):
        look(masks.Causal() & masks.Padding(lengths), 4)

    with pytest.raises(TypeError, match="mask must be known before anything is traced, got a traced And"):
        jax.jit(call)(jnp.array(3))


def test_the_gallery_shows_what_masks_are_today():
    with PIL.Image.open(gallery.FILE) as picture:
        assert picture.info["Description"] == gallery.digest(), "run `make pictures`"
    assert gallery.FILE.stat().st_size < 100_000


def test_the_gallery_is_drawn_again_byte_for_byte(tmp_path):
    files = tmp_path / "a.png", tmp_path / "b.png"
    for file in files:
        gallery.draw(file)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("title", gallery.GALLERY)
def test_the_titles_of_the_gallery_are_true(title):
    named = eval(title, {**vars(masks), "ids": np.zeros(1, int)})
    assert type(named) is type(gallery.GALLERY[title])
    assert named == gallery.GALLERY[title] or "ids" in title
