"""LeRobot's datasets with videos. What LeRobot filmed (``tests/golden/peers``) has the pictures that it reads itself;
of what is filmed here, each frame is that which is found by a seek of its own."""

from __future__ import annotations

import json
import os
import platform
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import Damaged
from pipeline.tools.exporting import export
from pipeline.tools.importing import import_data
from pipeline.tools.interchange.rows_out import transitions_of
from pipeline.tools.interchange.runs import open_run
from pipeline.tools.interchange.streams import Rows, Transitions, joined
from tests.support import peers

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")
av: Any = pytest.importorskip("av")

from pipeline.tools.formats import lerobot  # noqa: E402
from pipeline.tools.formats.arrow_rows import BATCH_BYTES  # noqa: E402
from tests.support.filmed import FPS, Film, Take, film_path, sought, write_dataset  # noqa: E402

PEERS = Path(__file__).parents[1] / "golden" / "peers"
FILMED = ["lerobot_0_4_4_av1", "lerobot_0_4_4_h264", "lerobot_0_3_3_av1"]
CAMERA, COLUMN = "observation.images.top", "obs.images.top"
LONG = (("g", "12"), ("bf", "3"), ("crf", "30"))
"""Of an encoder: frames that need later ones, and few that stand for themselves."""
QUIET = (*LONG, ("x265-params", "log-level=none"))


def times(count: int, begin: int = 0) -> list[float]:
    return [at / FPS for at in range(begin, begin + count)]


def rows_in(run: Path) -> Rows:
    return joined(list(transitions_of(open_run(str(run))).batches()))


def copied(name: str, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(PEERS / name, folder))


def changed_info(folder: Path, **fields: Any) -> None:
    path = folder / "meta" / "info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(folder: Path, match: str) -> None:
    target = folder.parent / "refused"
    with pytest.raises(Damaged, match=match):
        import_data(folder, target, from_="lerobot")
    assert not target.exists()
    assert not list(target.parent.glob("refused*")), "nothing is left beside either"


@pytest.mark.parametrize("name", FILMED)
def test_the_pictures_are_those_that_lerobot_reads_in_the_places_of_what_was_filmed(tmp_path: Path, name: str) -> None:
    imported = import_data(PEERS / name, tmp_path / "new")
    assert (imported.from_, imported.count) == ("lerobot", 15)
    rows = rows_in(tmp_path / "new")
    told = json.loads((PEERS / "lerobot_videos.json").read_text())[name]
    for camera, shape in peers.LEROBOT_CAMERAS.items():
        found = rows.columns[camera.replace("observation", "obs")]
        assert (found.dtype.name, found.shape) == ("uint8", (15, *shape))
        last = found.transpose(0, 2, 3, 1) if shape[0] == 3 else found
        if platform.machine() == "x86_64":  # elsewhere colours may be rounded otherwise
            assert [zlib.crc32(each.tobytes()) for each in last] == told[camera]
        seen = np.concatenate([peers.lerobot_pictures(number, camera) for number in range(5)])
        apart = np.abs(found[:, None].astype(int) - seen[None]).mean(axis=(2, 3, 4))
        assert apart.argmin(axis=1).tolist() == list(range(15))
        assert apart.diagonal().max() < 3
    begins = np.repeat(range(5), peers.LEROBOT_FILMED)
    places = np.concatenate([np.arange(length) for length in peers.LEROBOT_FILMED])
    assert np.array_equal(rows.columns["action"], np.stack([begins, places], 1).astype(np.float32))
    assert np.array_equal(rows.marks["#episode"], begins)
    assert np.array_equal(rows.marks["#place"], places)


def test_an_export_has_the_same_pictures_as_images(tmp_path: Path) -> None:
    import_data(PEERS / "lerobot_0_4_4_h264", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", to="lerobot", fps=30)
    (tmp_path / "out" / "forebay.json").unlink()  # so that it is read as anybody's
    features = json.loads((tmp_path / "out" / "meta" / "info.json").read_text())["features"]
    import_data(tmp_path / "out", tmp_path / "new")
    one, other = rows_in(tmp_path / "run"), rows_in(tmp_path / "new")
    for camera, shape in peers.LEROBOT_CAMERAS.items():
        assert (features[camera]["dtype"], features[camera]["shape"]) == ("image", list(shape))
        column = camera.replace("observation", "obs")
        assert np.array_equal(one.columns[column], other.columns[column])


def test_episodes_of_several_lengths_in_several_films_of_two_cameras(tmp_path: Path) -> None:
    wrist = "observation.wrist"  # x265 writes past the end of pictures that are smaller than its blocks of 64
    lengths = (7, 1, 12, 3)
    films = {
        CAMERA: ([Film(times(23), options=LONG)], [Take(0, 0.0), Take(0, 0.7), Take(0, 0.8), Take(0, 2.0)]),
        wrist: (
            [Film(times(8), (64, 96)), Film(times(15), (64, 96), "libx265", QUIET)],
            [Take(0, 0.0), Take(0, 0.7), Take(1, 0.0), Take(1, 1.2)],
        ),
    }
    write_dataset(tmp_path / "data", [times(length) for length in lengths], films)
    import_data(tmp_path / "data", tmp_path / "new")
    rows = rows_in(tmp_path / "new")
    for camera, (_, takes) in films.items():
        found = iter(rows.columns[camera.replace("observation", "obs")])
        for length, take in zip(lengths, takes, strict=True):
            path = film_path(tmp_path / "data", camera, take.film)
            for seconds in times(length):
                assert np.array_equal(next(found), sought(path, take.begin + seconds))


def test_rows_that_leave_out_frames_show_one_twice_or_go_back(tmp_path: Path) -> None:
    rows = [[0.0, 0.1, 0.5, 0.5, 0.9], [0.3, 0.2, 0.0]]
    films = {CAMERA: ([Film(times(14), options=LONG)], [Take(0, 0.4), Take(0, 0.0)])}
    write_dataset(tmp_path / "data", rows, films, order=[0, 1])  # the second episode comes first in the film
    import_data(tmp_path / "data", tmp_path / "new")
    path = film_path(tmp_path / "data", CAMERA, 0)
    shown = [0.4, 0.5, 0.9, 0.9, 1.3, 0.3, 0.2, 0.0]
    assert np.array_equal(rows_in(tmp_path / "new").columns[COLUMN], np.stack([sought(path, each) for each in shown]))


def test_frames_are_found_by_their_times_not_by_their_numbers(tmp_path: Path) -> None:
    filmed = [0.0, 0.1, 0.15, 0.4, 0.41, 1.7]
    films = {CAMERA: ([Film(filmed)], [Take(0, 0.0)])}
    write_dataset(tmp_path / "data", [[0.1, 0.4, 1.7]], films)
    import_data(tmp_path / "data", tmp_path / "new")
    path = film_path(tmp_path / "data", CAMERA, 0)
    found = rows_in(tmp_path / "new").columns[COLUMN]
    assert np.array_equal(found, np.stack([sought(path, each) for each in (0.1, 0.4, 1.7)]))


@pytest.mark.parametrize("off", [0.00009, -0.00009])
def test_a_time_may_be_another_by_as_much_as_lerobot_allows(tmp_path: Path, off: float) -> None:
    films = {CAMERA: ([Film(times(4))], [Take(0, 0.0)])}
    write_dataset(tmp_path / "data", [[0.0, 0.1, 0.2 + off, 0.3]], films)
    import_data(tmp_path / "data", tmp_path / "new")
    path = film_path(tmp_path / "data", CAMERA, 0)
    assert np.array_equal(rows_in(tmp_path / "new").columns[COLUMN][2], sought(path, 0.2))


def test_times_of_long_films_are_those_that_float32_keeps_of_them(tmp_path: Path) -> None:
    filmed = [4000 + at / 30 for at in range(6)]
    assert max(abs(float(np.float32(each)) - each) for each in filmed) > 1e-4
    write_dataset(tmp_path / "data", [filmed], {CAMERA: ([Film([0.0, *filmed])], [Take(0, 0.0)])})
    import_data(tmp_path / "data", tmp_path / "new")
    path = film_path(tmp_path / "data", CAMERA, 0)
    found = rows_in(tmp_path / "new").columns[COLUMN]
    assert np.array_equal(found, np.stack([sought(path, each) for each in filmed]))


def test_no_more_than_a_few_megabytes_of_pictures_are_held(tmp_path: Path) -> None:
    size = (256, 320)
    write_dataset(tmp_path / "data", [times(90)], {CAMERA: ([Film(times(90), size)], [Take(0, 0.0)])})
    stream = lerobot.read(str(tmp_path / "data"))
    assert isinstance(stream, Transitions)
    batches = list(stream.batches())
    assert len(batches) > 2
    assert max(batch.nbytes for batch in batches) <= BATCH_BYTES + 90 * 16
    rows = joined(batches)
    assert stream.nbytes >= rows.columns[COLUMN].nbytes, "the bar knows how much there is"
    path = film_path(tmp_path / "data", CAMERA, 0)
    for at in (0, 33, 34, 89):
        assert np.array_equal(rows.columns[COLUMN][at], sought(path, at / FPS))


def test_a_film_that_has_no_frame_at_a_time_is_refused(tmp_path: Path) -> None:
    where = r"file-000\.mp4: has no frame at "
    cases = [
        ([0.0, 0.1002], times(3), where + r"0\.1002 s, where frame 1 of episode 0.* the nearest one is at 0\.1000 s"),
        ([0.0, 0.05], times(3), where + r"0\.0500 s, where frame 1 of episode 0"),
        ([0.0, 0.1, 0.2, 0.3], times(3), where + r"0\.3000 s, where frame 3 of .* the video ends at 0\.2000 s"),
        ([-0.1, 0.1], times(3), where + r"-0\.1000 s, where frame 0 of episode 0"),
        ([0.0, float("nan")], times(3), where + r"nan s, where frame 1 of episode 0"),
        ([0.0, float("inf")], times(3), r"frame 1 of episode 0.* would be at inf s|has no frame at inf s"),
    ]
    for number, (rows, filmed, match) in enumerate(cases):
        folder = tmp_path / f"data{number}"
        write_dataset(folder, [rows], {CAMERA: ([Film(filmed)], [Take(0, 0.0)])})
        refused(folder, match)


def test_frames_of_the_next_episode_are_not_taken_for_those_of_one_that_is_too_short(tmp_path: Path) -> None:
    films = {CAMERA: ([Film(times(6))], [Take(0, 0.0), Take(0, 0.3)])}
    write_dataset(tmp_path / "data", [times(4), times(3)], films)
    refused(tmp_path / "data", r"file-000\.mp4: frame 3 of episode 0, .* would be at 0\.3000 s, where the next episode")


@pytest.mark.parametrize("name", FILMED)
def test_a_damaged_film_is_refused(tmp_path: Path, name: str) -> None:
    folder = copied(name, tmp_path / "data")
    film = max((folder / "videos").rglob("*.mp4"), key=lambda path: path.stat().st_size)
    whole = film.read_bytes()
    pictures = whole.index(b"mdat") + 4
    broken = {
        "empty": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\n" * 3,
        "cut": whole[: len(whole) // 2],
        "begun": whole[: pictures + 3],
        "zeros": whole[:pictures] + bytes(len(whole) - pictures),
    }
    for content in broken.values():
        film.write_bytes(content)
        refused(folder, rf"{film.name}: .*frame \d+ of episode \d+, observation.images")
    film.unlink()
    refused(folder, rf"{film.name}: is missing, and has observation.images.\w+ of episode \d")
    os.mkfifo(film)
    refused(folder, film.name)


def test_what_a_decoder_would_make_up_is_refused(tmp_path: Path) -> None:
    folder = copied("lerobot_0_4_4_h264", tmp_path / "data")
    film = folder / "videos" / "observation.images.wrist" / "chunk-000" / "file-001.mp4"
    whole = film.read_bytes()
    for at in (721, 742, 756):
        begin = whole.index(b"mdat") + 4 + at
        film.write_bytes(whole[:begin] + bytes(8) + whole[begin + 8 :])
        with av.open(str(film)) as container:
            assert len(list(container.decode(video=0))) == 6, "it says nothing by itself"
        refused(folder, r"file-001\.mp4: cannot be decoded, where frame \d of episode [23]")


def test_a_film_whose_last_frame_is_cut_is_refused(tmp_path: Path) -> None:
    film = Film(times(6), codec="libvpx-vp9", options=(("crf", "20"), ("lag-in-frames", "0")))
    folder = write_dataset(tmp_path / "data", [times(6)], {CAMERA: ([film], [Take(0, 0.0)])})
    path = film_path(folder, CAMERA, 0)
    whole = path.read_bytes()
    assert whole.index(b"moov") < whole.index(b"mdat"), "the end of the file is the last frame"
    for cut in range(1, 25, 2):
        path.write_bytes(whole[:-cut])
        refused(folder, r"file-000\.mp4: cannot be decoded, where frame \d of episode 0, .*its end is missing")


def test_a_film_that_names_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_dataset(tmp_path / "data", [times(3)], {CAMERA: ([Film(times(3))], [Take(0, 0.0)])})
    path = film_path(folder, CAMERA, 0)
    path.rename(path.with_name("other.mp4"))
    path.write_text("ffconcat version 1.0\nfile 'other.mp4'\n")
    monkeypatch.chdir(path.parent)  # where such a name would be looked for
    refused(folder, r"file-000\.mp4: cannot be decoded")


def test_a_film_that_goes_while_it_is_imported_is_refused(tmp_path: Path) -> None:
    folder = copied("lerobot_0_3_3_av1", tmp_path / "data")
    stream = lerobot.read(str(folder))
    assert isinstance(stream, Transitions)
    next((folder / "videos").rglob("*wrist/episode_000003.mp4")).unlink()
    with pytest.raises(Damaged, match=r"episode_000003\.mp4: is missing, and frame 0 of episode 3, .*wrist, is in it"):
        list(stream.batches())


def test_a_film_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = copied("lerobot_0_4_4_av1", tmp_path / "data")
    path = folder / "videos" / "observation.images.front" / "chunk-000" / "file-000.mp4"
    shutil.copy(str(path).replace("front", "wrist"), path)
    refused(folder, r"file-000\.mp4: frame 0 of episode 0, .*front, is \[72, 64\] pixels, where \[64, 96\] is said")


def test_what_is_told_of_episodes_must_be_there(tmp_path: Path) -> None:
    episodes = Path("meta/episodes/chunk-000/file-000.parquet")
    begin = "videos/observation.images.front/from_timestamp"
    table = pq.read_table(PEERS / "lerobot_0_4_4_av1" / episodes)
    at = table.column_names.index(begin)
    unwritten = pa.array([0.0, None, 0.2, 0.3, 0.4])
    for content, match in [
        (table.drop([begin]), f"{begin} is not told of every episode"),
        (table.set_column(at, begin, unwritten), f"{begin} is not told of every episode.*Finish the recording"),
        (table.slice(0, 4), "data has episode 4, which is not in meta/episodes"),
        (table.set_column(at, begin, pa.array(["x"] * 5)), "cannot be read"),
    ]:
        folder = copied("lerobot_0_4_4_av1", tmp_path / "data")
        pq.write_table(content, folder / episodes)
        refused(folder, match)
    (folder / episodes).write_bytes(b"PAR1")
    refused(folder, "meta/episodes: cannot be read as Parquet")
    (folder / episodes).unlink()
    refused(folder, "meta/episodes: is missing or empty")
    older = copied("lerobot_0_3_3_av1", tmp_path / "older")
    changed_info(older, total_episodes=4)
    refused(older, r"data has episode 4, and meta/info\.json says that there are 4")
    for dropped in ("timestamp", "frame_index"):
        older = copied("lerobot_0_3_3_av1", tmp_path / "older")
        features = json.loads((older / "meta" / "info.json").read_text())["features"]
        del features[dropped]
        changed_info(older, features=features)
        file = older / "data" / "chunk-000" / "episode_000002.parquet"
        pq.write_table(pq.read_table(file).drop([dropped]), file)
        refused(older, rf"episode_000002\.parquet, .*: there is no column {dropped}")


@pytest.mark.parametrize("name", FILMED)
def test_paths_that_lead_out_of_the_dataset_are_refused(tmp_path: Path, name: str) -> None:
    for template, match in [
        ("../{video_key}.mp4", "not inside the folder"),
        ("/etc/passwd", "not inside the folder"),
        ("videos/{video_key.__class__}.mp4", "only video_key, .* stand in braces"),
        ("videos/{0}.mp4", "stand in braces"),
        ("videos/{file_index:0999999999d}.mp4", "stand in braces"),
        ("videos/{video_key", "stand in braces"),
        ("videos/{episode_chunk}-{file_index}.mp4", "that this version does not"),
    ]:
        folder = copied(name, tmp_path / "data")
        changed_info(folder, video_path=template)
        refused(folder, rf"info\.json: video_path .*{match}")


def test_without_a_path_videos_lie_where_the_version_has_them(tmp_path: Path) -> None:
    for name in FILMED:
        folder = copied(name, tmp_path / "data")
        changed_info(folder, video_path=None)
        assert import_data(folder, tmp_path / name).count == 15


def test_videos_of_depth_come_as_pictures_and_are_named(tmp_path: Path) -> None:
    folder = copied("lerobot_0_4_4_av1", tmp_path / "data")
    features = json.loads((folder / "meta" / "info.json").read_text())["features"]
    features["observation.images.front"]["info"]["video.is_depth_map"] = True
    changed_info(folder, features=features)
    notes = import_data(folder, tmp_path / "new").notes
    assert "observation.images.front: said to be of depth; its 8-bit picture came along, as LeRobot gives it" in notes
    features["observation.images.front"]["shape"] = [64, 96, 1]
    changed_info(folder, features=features)
    refused(folder, r"a video is \[64, 96, 1\], where \[height, width, 3\] is needed")


def test_a_dry_run_looks_at_the_first_frames(tmp_path: Path) -> None:
    imported = import_data(PEERS / "lerobot_0_4_4_h264", tmp_path / "new", dry_run=True)
    assert imported.content == "transitions"
    assert not (tmp_path / "new").exists()
