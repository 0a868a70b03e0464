"""Pictures: what is where, pixel for pixel, and that files read back as what was written."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wmcli.errors import UsageError
from wmcli.report import images
from wmcli.report.images import _BAR as BAR
from wmcli.report.images import _GAP as GAP
from wmcli.report.images import _ROW_GAP as ROW_GAP
from wmcli.report.images import _SHARES as SHARES

T, H, W = 5, 40, 48  # enlarged five times in an animation, three times in a strip


def frames(seed, time=T, colors=256):
    return np.random.default_rng(seed).integers(0, colors, (time, H, W, 3), dtype=np.uint8)


def read_film(path):
    with Image.open(path) as film:
        shown = []
        for index in range(film.n_frames):
            film.seek(index)
            picture = np.asarray(film.convert("RGB"))  # WebP knows a frame's duration when it is decoded
            shown.append((picture, film.info["duration"]))
        return shown, film.info["loop"]


def test_upscale_repeats_pixels_and_never_shrinks():
    small = frames(0)
    large = images.upscale(small, 200)
    assert large.shape == (T, 5 * H, 5 * W, 3)
    np.testing.assert_array_equal(large[:, 2::5, 4::5], small)
    np.testing.assert_array_equal(images.upscale(small, 10), small)
    for height in (32, 64, 84, 96, 128, 210):
        assert 160 <= images.upscale(np.zeros((1, height, 8, 3), np.uint8)).shape[1] <= 256


def test_side_by_side_shows_each_frame_in_its_panel():
    real, imagined = frames(1), frames(2)
    movie = images.side_by_side(real, imagined, context=2, error=True)
    width = 5 * W
    assert movie.shape == (T, BAR + 5 * H, 3 * width + 2 * GAP, 3)
    difference = np.abs(real.astype(int) - imagined.astype(int))
    for index, panel in enumerate((real, imagined, difference)):
        left = index * (width + GAP)
        np.testing.assert_array_equal(movie[:, BAR + 2 :: 5, left + 2 : left + width : 5], panel)
    assert (movie[:2, BAR:, width : width + GAP] == images.LINE).all()
    assert (movie[2:, :, width : width + GAP] == images.MARKER).all()
    right = slice(width + GAP, 2 * width + GAP)
    assert (movie[0, :BAR, right] == movie[1, :BAR, right]).all()  # "context"
    assert (movie[1, :BAR, right] != movie[2, :BAR, right]).any()  # "imagined"
    assert (movie[0, :BAR, :width] == images.TEXT).all(axis=-1).any()  # something is written


def test_without_context_no_marker_is_drawn():
    movie = images.side_by_side(frames(1), frames(2))
    assert not (movie == images.MARKER).all(axis=-1).any()


def test_grey_frames_become_rgb():
    gray = frames(1)[..., :1]
    np.testing.assert_array_equal(images.side_by_side(gray, gray), images.side_by_side(*[gray.repeat(3, axis=-1)] * 2))


def test_captions_say_step_action_reward_and_return():
    captions = images.play_captions([0, 2, 1], [0.0, 1.0, -2.5], ["NOOP", "FIRE", "LEFT"])
    assert captions == [
        "step 0   NOOP\nreward 0   return 0",
        "step 1   LEFT\nreward +1   return 1",
        "step 2   FIRE\nreward -2.5   return -1.5",
    ]
    assert images.play_captions(np.array([3]), np.array([1.0], np.float32)) == [
        "step 0   action 3\nreward +1   return 1"
    ]
    assert images.play_captions([0], [0.0], None, [0.125]) == [
        "step 0   action 0\nreward 0   return 0\nsearched value 0.12"
    ]
    assert images.play_captions([[-0.0, -0.5]], [-0.0], None, [-0.004]) == [
        "step 0   action 0 -0.5\nreward 0   return 0\nsearched value 0.00"
    ]


def test_numbers_are_short_and_scores_whole():
    values = (0, -0.0, -0.5, np.float32(0.1), 1 / 3, -20.0, 999.96, 15376.5, 1234567.0)
    want = ["0", "0", "-0.5", "0.1", "0.3333", "-20", "1000", "15376.5", "1234567"]
    assert [images.short_number(float(value)) for value in values] == want


def test_shares_stand_under_the_frames_and_that_of_the_action_is_amber():
    real, shares = frames(3), np.array([[0.25, 0.75, 0], [1, 0, 0], [0, 0.5, 0.5], [0, 0, 1], [0, 0, 1]])
    movie = images.over_shares(real, shares, [1, 1, 2, 2, 0])
    assert movie.shape == (T, 5 * H + SHARES, 5 * W, 3)
    np.testing.assert_array_equal(movie[:, : 5 * H], images.upscale(real))
    band = movie[:, 5 * H :]
    edges = np.linspace(0, 5 * W, 4).round().astype(int)
    middle = (edges[:-1] + edges[1:]) // 2
    for t, taken in enumerate([1, 1, 2, 2, 0]):
        for action in range(3):
            color = images.MARKER if action == taken else images.FAINT
            filled = (band[t, :, middle[action]] == color).all(-1)
            assert filled.sum() == round(shares[t, action] * SHARES)
            assert filled[::-1][: filled.sum()].all(), "it stands on the ground"
    assert (band[:, :, edges[:-1]] == images.BACKGROUND).all()


@pytest.mark.parametrize("count", [18, 62, 80, 100, 192, 200, 240, 241, 1000])
def test_of_many_actions_each_share_shows(count):
    """240 pixels: bars lose their gaps, then neighbors share one, which is as high as the largest of their shares."""
    rng = np.random.default_rng(count)
    shares, taken = np.zeros((T, count)), rng.integers(count, size=T)
    for row, action in zip(shares, taken, strict=True):
        row[rng.choice(count, 5, replace=False)] = 0.125
        row[action] = 0.25
    shares[0, [0, count - 1]] = 0.001  # still a pixel
    band = images.over_shares(frames(3), shares, list(taken))[:, 5 * H :]
    for row, action, picture in zip(shares, taken, band, strict=True):
        drawn = (picture != images.BACKGROUND).any(-1).sum(0)  # by pixel from left to right
        amber = (picture == images.MARKER).all(-1).sum(0)
        for each in range(count):
            place = slice(math.floor(each * 5 * W / count), math.ceil((each + 1) * 5 * W / count) + 1)
            assert drawn[place].max() >= math.ceil(row[each] * SHARES)
        place = slice(math.floor(action * 5 * W / count), math.ceil((action + 1) * 5 * W / count) + 1)
        assert amber[place].max() == 10 and amber.sum() == amber[place].sum()


def test_a_share_of_an_action_not_taken_is_gray_beside_the_one_taken():
    shares = np.zeros((1, 1000))
    shares[0, 0], shares[0, 1] = 0.25, 0.75  # in one bar
    for taken, colors in ((0, [images.MARKER] * 10 + [images.FAINT] * 20), (1, [images.MARKER] * 30)):
        band = images.over_shares(frames(3, 1), shares, [taken])[0, 5 * H :]
        assert [tuple(color) for color in band[::-1, 0][: len(colors)]] == colors
        assert (band[: -len(colors)] == images.BACKGROUND).all()


def test_captioned_keeps_the_frames_and_writes_below():
    real = frames(3)
    movie = images.captioned(real, ["a\nb", "a\nb", "a", "", "x" * 500])
    assert movie.shape == (T, 5 * H + 2 * BAR, 5 * W, 3)
    np.testing.assert_array_equal(movie[:, : 5 * H : 5, ::5], real)
    assert (movie[0, 5 * H :] == movie[1, 5 * H :]).all() and (movie[0, 5 * H :] != movie[2, 5 * H :]).any()
    assert (movie[3, 5 * H :] == images.BACKGROUND).all()
    assert (movie[4, 5 * H :, -4:] == images.BACKGROUND).all()  # too long a line is cut before the edge


def test_a_caption_too_long_for_its_line_goes_on_below():
    """In all frames alike, so that nothing jumps: a large return is not cut off."""
    narrow = frames(3)[:, :, :20]  # 100 pixels
    captions = images.play_captions([0] * T, [1234.5] * T, ["FIRE"])
    assert captions[-1] == "step 4   FIRE\nreward +1234.5   return 6172.5"
    want = [caption.replace("5   return", "5\nreturn") for caption in captions]
    np.testing.assert_array_equal(images.captioned(narrow, captions), images.captioned(narrow, want))
    one_is_long = [*want[:-1], captions[-1]]
    mixed = images.captioned(narrow, ["reward 0   return 0", *["reward +1234.5   return 6172.5"] * (T - 1)])
    assert mixed.shape[1] == 5 * H + 2 * BAR and images.captioned(narrow, one_is_long).shape[1] == 5 * H + 3 * BAR
    np.testing.assert_array_equal(mixed[0], images.captioned(narrow[:1], ["reward 0\nreturn 0"])[0])


@pytest.mark.parametrize("context", [3, 4])
def test_strip_has_time_to_the_right_and_a_line_before_the_first_imagined_frame(context):
    real, imagined = frames(4, 7), frames(5, 7)
    picture = images.strip(
        {"real": real, "imagined": imagined}, steps=range(0, 7, 2), context=context
    )  # columns 0, 2 | 4, 6
    tile, margin = 3 * W, picture.shape[1] - 4 * (3 * W + GAP) + GAP
    assert picture.shape[0] == BAR + 2 * 3 * H + ROW_GAP
    for column, step in enumerate((0, 2, 4, 6)):
        left = margin + column * (tile + GAP)
        for row, source in enumerate((real, imagined)):
            top = BAR + row * (3 * H + ROW_GAP)
            np.testing.assert_array_equal(picture[top + 1 : top + 3 * H : 3, left + 1 : left + tile : 3], source[step])
    marked = np.flatnonzero((picture == images.MARKER).all(axis=(0, 2)))
    assert marked.tolist() == [margin + 2 * (tile + GAP) - 2, margin + 2 * (tile + GAP) - 1]


def test_a_strip_that_starts_late_keeps_its_time_steps():
    real = frames(4, 7)
    late = images.strip({"real": real}, steps=(3, 5), context=5)  # columns 3 | 5
    first = images.strip({"real": real[[3, 5]]}, context=1)  # the same pictures, as columns 0 | 1
    assert late.shape == first.shape
    np.testing.assert_array_equal(late[BAR:], first[BAR:])
    assert (late[:BAR] != first[:BAR]).any()


def test_phases_of_a_strip_are_named_over_their_columns():
    real, blue, rule = frames(4, 9), (10, 20, 250), 3
    phases = [images.Phase(0, "context"), images.Phase(4, "teleport", blue), images.Phase(7, "imagined", images.MARKER)]
    shown = (2, 3, 4, 6, 7, 8)
    picture = images.strip({"real": real}, steps=shown, phases=phases)
    top, tile = BAR + rule + BAR, 3 * W
    margin = picture.shape[1] - len(shown) * (tile + GAP) + GAP
    assert picture.shape[0] == top + 3 * H
    for column, step in enumerate(shown):
        left = margin + column * (tile + GAP)
        np.testing.assert_array_equal(picture[top + 1 :: 3, left + 1 : left + tile : 3], real[step])
    bar = picture[BAR : BAR + rule, margin:]
    for phase, columns in zip(phases, ((0, 2), (2, 4), (4, 6)), strict=True):
        left, right = (column * (tile + GAP) for column in columns)
        assert (bar[:, left : right - GAP] == phase.color).all()
        before = picture[:, margin + left - GAP : margin + left]
        assert (before == phase.color).all() == (phase.begin > 0)
        name = picture[:BAR, margin + left : margin + right - GAP]
        assert (name != images.BACKGROUND).any()
    # A phase goes on in the next row without a line before it.
    long = images.strip({"real": frames(6, 20)}, steps=range(20), phases=phases[:2])
    half = (len(long) + 3 * ROW_GAP) // 2
    assert (long[half + BAR : half + BAR + rule, -W:] == blue).all()
    assert not (long[half:] == blue).all(-1).all(0)[: margin + 1].any()


@pytest.mark.parametrize(("side", "columns"), [(64, (9, 9, 8)), (160, (9, 9, 8)), (84, (9, 9, 8)), (16, (9, 9, 8))])
def test_a_long_strip_goes_on_below(side, columns):
    """26 frames of an Atari game in three rows: one of 4,229 pixels is too wide for any screen."""
    real, imagined = (np.full((26, side, side, 3), np.arange(26)[:, None, None, None] * 9, np.uint8) for _ in range(2))
    imagined = 255 - imagined
    picture = images.strip({"real": real, "imagined": imagined}, context=10)
    tile = images.upscale(real[:1], 128).shape[1]
    block, margin = BAR + 2 * (tile + ROW_GAP) - ROW_GAP, picture.shape[1] - columns[0] * (tile + GAP) + GAP
    assert picture.shape[1] <= 1600 and picture.shape[0] == 3 * (block + 3 * ROW_GAP) - 3 * ROW_GAP
    for step in range(26):
        left = margin + step % columns[0] * (tile + GAP)
        for row, source in enumerate((real, imagined)):
            top = step // columns[0] * (block + 3 * ROW_GAP) + BAR + row * (tile + ROW_GAP)
            assert (picture[top : top + tile, left : left + tile] == source[step, 0, 0]).all()
    marked = np.argwhere((picture == images.MARKER).all(axis=-1))
    assert marked[:, 0].min() == block + 3 * ROW_GAP and marked[:, 0].max() == 2 * block + 3 * ROW_GAP - 1
    assert set(marked[:, 1].tolist()) == {margin + tile, margin + tile + 1}
    assert (picture[-block:, margin + columns[2] * (tile + GAP) :] == images.BACKGROUND).all()


def written(picture):
    """Columns of a heading with text."""
    return np.flatnonzero((picture != images.BACKGROUND).any(-1).any(0))


def test_long_names_of_rows_are_cut_in_the_middle_and_leave_room_for_frames():
    long = "a preset of a very long name, runs/of/a/study/in/a/deep/folder/of/seed-{}: reward 0.25"
    labels = [long.format(seed) for seed in (1, 2)]
    picture = images.strip({label: frames(1) for label in labels})
    tile = 3 * W + GAP
    assert picture.shape[1] == images._WIDEST_LABEL + T * tile - GAP and images.columns_that_fit(frames(1), labels) > T
    one, other = (picture[BAR + row * (3 * H + ROW_GAP) :][: 3 * H, : images._WIDEST_LABEL] for row in (0, 1))
    assert (one != other).any(), "the ends tell them apart"
    assert not (written(one) > images._WIDEST_LABEL - 2).any()
    assert images._shortened("short", 100) == "short"
    cut = images._shortened(labels[0], 160)
    start, _, end = cut.partition("…")
    assert labels[0].startswith(start) and labels[0].endswith(end) and "seed-1: reward 0.25".endswith(end[-12:])
    assert images._font().getlength(cut) <= 160


def test_headings_of_narrow_frames_show_all_digits(monkeypatch):
    narrow = np.full((2000, 64, 8, 3), 99, np.uint8)
    said = []
    text = images._text
    monkeypatch.setattr(
        images, "_text", lambda line, width, *a, **k: said.append((line, width)) or text(line, width, *a, **k)
    )
    picture = images.strip({"real": narrow}, steps=[1000, 1500, 1999])
    headings = [(line, width) for line, width in said if line[-1].isdigit()]
    assert [line for line, _ in headings] == ["1000", "1500", "1999"]  # "t = 1000" has no room
    assert all(images._font().getlength(line) <= width - 4 for line, width in headings)
    assert ((picture == 99).all(-1).sum(1) == 3 * 16).sum() == 128, "frames are not stretched"


def test_side_by_side_takes_captions_and_says_when_the_real_side_is_over():
    real, imagined = frames(1), frames(2)
    captions = (["a"] * T, ["b\nc"] * T)
    movie = images.side_by_side(real, imagined, context=2, over=3, captions=captions)
    plain = images.side_by_side(real, imagined, context=2)
    width = 5 * W
    assert movie.shape == (T, plain.shape[1] + 2 * BAR, plain.shape[2], 3)
    np.testing.assert_array_equal(movie[:3, : plain.shape[1]], plain[:3])
    np.testing.assert_array_equal(movie[3:, BAR : plain.shape[1]], plain[3:, BAR:])
    assert (movie[2, :BAR, :width] != movie[3, :BAR, :width]).any()
    below = images.captioned(imagined, captions[1])[:, 5 * H :]
    np.testing.assert_array_equal(movie[:, plain.shape[1] :, width + GAP :], below)


def test_grid_wraps_and_shows_the_error_below():
    originals, decoded = frames(6), frames(7)
    picture = images.grid(originals, decoded, columns=3)  # 3 and 2 columns
    tile, margin = 3 * W, picture.shape[1] - 3 * (3 * W + GAP) + GAP
    block = 3 * (3 * H + ROW_GAP) - ROW_GAP
    assert picture.shape[0] == 2 * block + 3 * ROW_GAP
    rows = (originals, decoded, np.abs(originals.astype(int) - decoded.astype(int)))
    for index in range(T):
        left = margin + index % 3 * (tile + GAP)
        for row, source in enumerate(rows):
            top = index // 3 * (block + 3 * ROW_GAP) + row * (3 * H + ROW_GAP)
            np.testing.assert_array_equal(picture[top + 1 : top + 3 * H : 3, left + 1 : left + tile : 3], source[index])
    assert (picture[-block:, margin + 2 * (tile + GAP) :] == images.BACKGROUND).all()


def test_png_reads_back(tmp_path):
    picture = frames(8)[0]
    images.write_png(tmp_path / "a.png", picture)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "a.png")), picture)


def test_a_gif_of_few_colors_is_exact_and_keeps_its_time(tmp_path):
    movie = frames(9, 7, colors=6)  # at most 216 colors
    movie[3] = movie[2]  # a still: the writer may join the two, but not shorten the film
    images.write_gif(tmp_path / "a.gif", movie, fps=15)
    shown, loop = read_film(tmp_path / "a.gif")
    assert loop == 0
    assert sum(duration for _, duration in shown) == 470  # 7 / 15 s in whole hundredths
    np.testing.assert_array_equal([picture for picture, _ in shown], movie[[0, 1, 2, 4, 5, 6]])


def test_a_gif_of_many_colors_stays_close_and_keeps_a_rare_one(tmp_path):
    ramp = np.linspace(0, 255, 64).round()
    movie = np.zeros((4, 64, 64, 3), np.uint8)
    movie[..., 0], movie[..., 1], movie[..., 2] = ramp[:, None], ramp[None], 90  # 4096 colors
    for time in range(4):
        movie[time, 30:32, 10 + time : 12 + time] = (0, 255, 255)  # a ball of four pixels
    images.write_gif(tmp_path / "a.gif", movie, fps=10)
    shown, _ = read_film(tmp_path / "a.gif")
    error = np.abs(np.stack([picture for picture, _ in shown]).astype(int) - movie)
    assert error.mean() < 6 and error.max() < 40
    assert all(error[time, 30:32, 10 + time : 12 + time].max() < 16 for time in range(4))


def moving(kind):
    """Frames (T', H, W, 3) that change in ways that an encoder of differences could get wrong."""
    noise = frames(12, 9)
    if kind == "noise":
        return noise
    if kind == "one pixel":
        movie = noise[:1].repeat(40, 0)
        for time in range(40):
            movie[time, time % H, time % W] += 1
        return movie
    ramp = np.linspace(0, 255, H * W).reshape(H, W, 1).repeat(3, 2)
    return np.stack([np.roll(ramp, 7 * time, axis=1) * (time % 3) / 2 for time in range(30)]).astype(np.uint8)


@pytest.mark.parametrize("kind", ["noise", "one pixel", "fading ramp"])
def test_every_pixel_of_a_webp_is_exact(tmp_path, kind):
    movie = moving(kind)
    images.write_webp(tmp_path / "a.webp", movie, fps=10)
    shown, loop = read_film(tmp_path / "a.webp")
    assert loop == 0
    assert sum(duration for _, duration in shown) == 100 * len(movie)
    np.testing.assert_array_equal([picture for picture, _ in shown], movie)


def test_a_webp_keeps_its_time_and_joins_equal_frames(tmp_path):
    movie = frames(13, 7)
    movie[3] = movie[2]
    images.write_webp(tmp_path / "a.webp", movie, fps=15)
    shown, _ = read_film(tmp_path / "a.webp")
    assert [duration for _, duration in shown] == [67, 66, 134, 66, 67, 67]  # 7 / 15 s in whole thousandths
    np.testing.assert_array_equal([picture for picture, _ in shown], movie[[0, 1, 2, 4, 5, 6]])


def test_a_webp_of_one_frame_or_of_gray_ones_is_written_too(tmp_path):
    gray = frames(14)[..., :1]
    images.write_webp(tmp_path / "a.webp", gray, fps=5)
    np.testing.assert_array_equal([each for each, _ in read_film(tmp_path / "a.webp")[0]], gray.repeat(3, -1))
    images.write_webp(tmp_path / "b.webp", gray[:1], fps=5)
    with Image.open(tmp_path / "b.webp") as still:
        np.testing.assert_array_equal(np.asarray(still.convert("RGB")), gray[0].repeat(3, -1))


def test_a_webp_of_many_colors_is_smaller_than_a_gif_and_exact(tmp_path):
    """As a film of a game is: the same background, and something that moves."""
    background = frames(15, 1).repeat(16, axis=0)
    for time in range(16):
        background[time, 10:20, time : time + 8] = (255, time, 0)
    movie = images.captioned(background, [f"step {time}" for time in range(16)])
    for name in ("a.webp", "a.gif"):
        images.write_animation(tmp_path / name, movie, fps=10)
    assert (tmp_path / "a.webp").stat().st_size < (tmp_path / "a.gif").stat().st_size
    np.testing.assert_array_equal([each for each, _ in read_film(tmp_path / "a.webp")[0]], movie)


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".WEBP"])
def test_the_same_frames_give_the_same_bytes(tmp_path, suffix):
    for name in ("a", "b"):
        images.write_animation(tmp_path / f"{name}{suffix}", frames(10), fps=8)
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
@pytest.mark.parametrize("fps", [0, -1, 51, float("nan")])
def test_a_looping_film_refuses_a_rate_it_cannot_play(tmp_path, fps, suffix):
    with pytest.raises(UsageError, match=rf"a \{suffix} plays at most 50 frames per second.*\.mp4"):
        images.write_animation(tmp_path / f"a{suffix}", frames(0), fps)
    assert not list(tmp_path.iterdir())


def test_unknown_suffix_and_missing_folder_are_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"\.webp or \.gif or \.mp4"):
        images.write_animation(tmp_path / "a.avi", frames(0), 10)
    with pytest.raises(UsageError, match="create it first"):
        images.write_animation(tmp_path / "none" / "a.gif", frames(0), 10)
    (tmp_path / "folder.gif").mkdir()
    with pytest.raises(UsageError, match="cannot write"):
        images.write_gif(tmp_path / "folder.gif", frames(0), 10)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.gif"]  # no draft left


def test_mp4_without_the_extra_names_it_and_the_alternative(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(UsageError, match=r"pip install 'wmcli\[video\]'.*\.webp"):
        images.write_animation(tmp_path / "a.mp4", frames(0), 10)


def test_mp4_hands_the_encoder_even_frames(tmp_path, monkeypatch):
    received = []

    def write_frames(path, size, **options):
        received.append((size, options["fps"]))
        with Path(path).open("wb") as file:
            while True:
                try:
                    frame = yield
                except GeneratorExit:
                    return
                if frame is not None:
                    received.append(frame)
                    file.write(b"x")

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", types.SimpleNamespace(write_frames=write_frames))
    odd = frames(11)[:, :-1, :-3]
    images.write_mp4(tmp_path / "a.mp4", odd, 12)
    assert received[0] == ((W - 2, H), 12)
    np.testing.assert_array_equal(np.stack(received[1:])[:, : H - 1, : W - 3], odd)
    assert (tmp_path / "a.mp4").read_bytes() == b"x" * T
