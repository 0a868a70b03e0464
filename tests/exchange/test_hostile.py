"""Files that are damaged, lie, or mean harm end in one line within two seconds."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from recordings import SPACES, random_recording
from seconds import within

from wmcli.errors import ArtifactError, UsageError
from wmcli.exchange import open_recording, write_recording
from wmcli.spaces import Spaces

SECONDS = 2.0
IMAGE = Spaces.of_images(16, 3)


def refused(folder: Path, match: str, **how: Any) -> None:
    """Read everything, which must fail with one line in time."""
    with within(SECONDS), pytest.raises((UsageError, ArtifactError)) as raised:
        list(open_recording(str(folder), **how))
    line = str(raised.value)
    assert "\n" not in line and len(line) < 700
    assert match in line, line


def arrays(time: int = 5, **changes: Any) -> dict[str, Any]:
    """A good episode in wm's layout, with changes; None removes a key."""
    rng = np.random.default_rng(0)
    good = {
        "observation": rng.integers(0, 256, (time + 1, 16, 16, 3), dtype=np.uint8),
        "action": np.arange(time) % 3,
        "reward": np.zeros(time, np.float32),
        "terminated": np.arange(time) == time - 1,
        "truncated": np.zeros(time, bool),
    }
    return {key: value for key, value in (good | changes).items() if value is not None}


# -- values: the same in every format ----------------------------------------------------------------------------------

VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "no action": ({"action": None}, "no action"),
    "no reward": ({"reward": None}, "no reward"),
    "no observation": ({"observation": None}, "no observation"),
    "NaN": ({"reward": np.full(5, np.nan)}, "NaN or infinity"),
    "infinity": ({"reward": np.full(5, np.inf)}, "NaN or infinity"),
    "too large": ({"observation": np.full((6, 2), 1e300)}, "too large for float32"),
    "few rewards": ({"reward": np.zeros(4)}, "4"),
    "few observations": ({"observation": np.zeros((4, 16, 16, 3), np.uint8)}, "4"),
    "many observations": ({"observation": np.zeros((7, 16, 16, 3), np.uint8)}, "7 observations for 5 actions"),
    "few flags": ({"terminated": np.zeros(3, bool)}, "3"),
    "no flags": ({"terminated": np.arange(5)}, "0 and 1"),
    "texts": ({"action": np.array(list("abcde"))}, "not plain numbers"),
    "complex": ({"reward": np.zeros(5, complex)}, "not plain numbers"),
    "images of floats": ({"observation": np.zeros((6, 16, 16, 3))}, "neither an image in uint8"),
    "deep images": ({"observation": np.zeros((6, 2, 16, 16, 3), np.uint8)}, "neither an image in uint8"),
    "empty": (arrays(0), ""),
    "negative action": ({"action": np.array([0, 1, 2, 0, -1])}, "are no numbers of actions"),
    "huge action": ({"action": np.array([0, 1, 2, 0, 2**40])}, "are no numbers of actions"),
    "actions of nothing": ({"action": np.zeros((5, 0))}, "not numbers"),
    "actions of matrices": ({"action": np.zeros((5, 2, 2))}, "not numbers"),
    "ends in between": ({"terminated": np.arange(5) == 2}, "ends before its last action"),
}


@pytest.mark.parametrize("case", VALUES)
@pytest.mark.parametrize("form", ["npz", "hdf5", "zarr"])
def test_wrong_values(form: str, case: str, tmp_path: Path) -> None:
    changes, match = VALUES[case]
    _write(form, tmp_path, arrays(**changes))
    refused(tmp_path, match if form == "npz" or case != "empty" else "", form=form)


def _write(form: str, folder: Path, columns: dict[str, Any]) -> None:
    if form == "npz":
        np.savez(folder / "a.npz", **columns)
    elif form == "hdf5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(folder / "a.hdf5", "w") as file:
            group = file.create_group("episode_0")
            for name, array in columns.items():
                group[name] = array.astype("S") if array.dtype.kind == "U" else array
    else:
        import zarr

        root = zarr.create_group(store=folder, zarr_format=3)
        group = root.create_group("episode_0")
        for name, array in columns.items():
            if array.dtype.kind == "U":
                array = array.astype("S4")
            shape = tuple(max(size, 1) for size in array.shape)
            group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=shape)[...] = array


@pytest.mark.parametrize("action", [[0, 1, 3, 0, 0], [0, -1, 0, 0, 0], [0, 0.5, 0, 0, 0]])
def test_actions_out_of_the_range_of_the_environment(action: list[float], tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays(action=np.array(action)))
    refused(tmp_path, "fractions" if 0.5 in action else "out of range, 0 to 2", spaces=IMAGE)


def test_continuous_actions_out_of_stated_bounds(tmp_path: Path) -> None:
    recording = random_recording(SPACES["one named part"])
    write_recording(recording, "npz", tmp_path / "out")
    file = tmp_path / "out" / "episode-0000004.npz"
    with np.load(file) as opened:
        columns = dict(opened)
    np.savez(file, **columns | {"action": columns["action"] + 1.5})
    refused(tmp_path / "out", "out of range, -1 to 1")


def test_episodes_that_differ_from_each_other(tmp_path: Path) -> None:
    np.savez(tmp_path / "0.npz", **arrays())
    np.savez(tmp_path / "1.npz", **arrays(observation=np.zeros((6, 16, 18, 3), np.uint8)))
    refused(tmp_path, "not (16, 16, 3); to resize them: --size")
    np.savez(tmp_path / "1.npz", **arrays(observation=None, image=np.zeros((6, 16, 16, 3), np.uint8)))
    refused(tmp_path, "has no observation")


# -- npz ---------------------------------------------------------------------------------------------------------------


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def header(shape: str, descr: str = "'<f8'") -> bytes:
    """The header of an npy file, with whatever shape."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


class Bomb:
    def __reduce__(self) -> tuple[Callable, tuple]:
        return (Path.write_text, (Path("/tmp/wm-was-here"), "x"))


def zipped(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def members(**changes: bytes) -> dict[str, bytes]:
    return {f"{name}.npy": npy(array) for name, array in arrays().items()} | {
        f"{name}.npy": data for name, data in changes.items()
    }


def _huge(path: Path) -> None:
    """A gigabyte of zeros in a megabyte."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in members().items():
            if name != "observation.npy":
                archive.writestr(name, data)
        with archive.open("observation.npy", "w", force_zip64=True) as member:
            member.write(header("(300, 1024, 1024, 3)", "'|u1'"))
            zeros = bytes(1 << 20)
            for _ in range(900):
                member.write(zeros)


def _patched(path: Path) -> None:
    """A file that says it is smaller than it is."""
    zipped(path, members())
    data = bytearray(path.read_bytes())
    place = data.rindex(b"PK\x01\x02")
    data[place + 24 : place + 28] = (12).to_bytes(4, "little")
    path.write_bytes(data)


NPZ: dict[str, tuple[Callable[[Path], None], str]] = {
    "no archive": (lambda path: path.write_bytes(b"nothing"), "cannot be read"),
    "nothing at all": (lambda path: path.write_bytes(b""), "cannot be read"),
    "cut off": (lambda path: (zipped(path, members()), path.write_bytes(path.read_bytes()[:-600])), "cannot be read"),
    "a pickle": (lambda path: zipped(path, members(action=npy(np.array([Bomb()] * 5, object)))), "not plain numbers"),
    "a record": (
        lambda path: zipped(path, members(action=npy(np.zeros(5, [("a", int), ("b", "O")])))),
        "not plain numbers",
    ),
    "a bomb": (_huge, "would unpack to"),
    "a shape of 2^40": (lambda path: zipped(path, members(reward=header("(1099511627776,)"))), "more than"),
    "a shape of less than nothing": (lambda path: zipped(path, members(reward=header("(-5,)"))), ""),
    "a shape of texts": (lambda path: zipped(path, members(reward=header("('a',)"))), "cannot be read"),
    "a deep header": (lambda path: zipped(path, members(reward=header("(" * 3000 + ")" * 3000))), "cannot be read"),
    "code as a header": (lambda path: zipped(path, members(reward=header("__import__('os')"))), "cannot be read"),
    "no npy": (lambda path: zipped(path, members(reward=b"abc")), "cannot be read"),
    "other files": (lambda path: zipped(path, members() | {"../../up.txt": b"x"}), "not written by numpy.savez"),
    "bzip2": (lambda path: zipped(path, members(), zipfile.ZIP_BZIP2), "not written by numpy.savez"),
    "many": (lambda path: zipped(path, members() | {f"{n}.npy": b"" for n in range(2000)}), "more than 1000"),
    "a wrong size": (_patched, ""),
    "fewer bytes": (lambda path: zipped(path, members(reward=npy(np.zeros(5))[:-8])), "32 bytes for shape (5,)"),
}


@pytest.mark.parametrize("case", NPZ)
def test_npz(case: str, tmp_path: Path) -> None:
    write, match = NPZ[case]
    write(tmp_path / "a.npz")
    refused(tmp_path, match)
    assert not Path("/tmp/wm-was-here").exists()


def test_every_flipped_byte_of_an_npz_is_noticed_or_does_not_matter(tmp_path: Path) -> None:
    """zip has a checksum for contents; headers of members that are not used may differ."""
    path = tmp_path / "a.npz"
    zipped(path, members())
    whole = path.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(whole), 60):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            list(open_recording(str(tmp_path), spaces=IMAGE))
        except UsageError as error:
            assert "\n" not in str(error)


def test_links_that_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    np.savez(tmp_path / "outside.npz", **arrays())
    (tmp_path / "inside" / "a.npz").symlink_to(tmp_path / "outside.npz")
    refused(tmp_path / "inside", "leads out of its folder")
    (tmp_path / "inside" / "a.npz").unlink()
    (tmp_path / "inside" / "a.npz").symlink_to("a.npz")
    refused(tmp_path / "inside", "")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 200_000, "nested too deeply"),
        ("[]", "no JSON object"),
        ("{", "no valid JSON"),
        ('{"format": "other"}', "not written as"),
        ('{"format": "wm-recording", "schema": 1}', "describes no spaces"),
        ('{"format": "wm-recording", "schema": 1, "spaces": {"size": -1, "actions": 3}}', "describes no spaces"),
        ('{"format": "wm-recording", "schema": 1, "spaces": {"size": 8, "actions": {"kind": "x"}}}', "no spaces"),
        ('{"format": "wm-recording", "schema": 1, "spaces": {"size": 8, "actions": 1e999}}', "no spaces"),
    ],
)
def test_descriptions(text: str, match: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays())
    (tmp_path / "recording.json").write_text(text)
    refused(tmp_path, match)


# -- HDF5 --------------------------------------------------------------------------------------------------------------


def _hdf5(folder: Path, change: Callable[[Any, Any], None]) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "a.hdf5", "w") as file:
        group = file.create_group("episode_0")
        for name, array in arrays().items():
            group[name] = array
        change(h5py, group)


def _replace(group: Any, name: str, value: Any) -> None:
    del group[name]
    group[name] = value


def _external_data(h5py: Any, group: Any) -> None:
    del group["reward"]
    group.create_dataset("reward", (5,), "f8", external=[("/etc/hostname", 0, 40)])


def _virtual(h5py: Any, group: Any) -> None:
    del group["reward"]
    layout = h5py.VirtualLayout((5,), "f8")
    layout[:] = h5py.VirtualSource("/tmp/other.hdf5", "x", shape=(5,))
    group.create_virtual_dataset("reward", layout)


def _empty_huge(h5py: Any, group: Any) -> None:
    del group["observation"]
    group.create_dataset("observation", (6, 8_000, 8_000, 3), "u1", chunks=(1, 100, 100, 3), compression="gzip")


def _huge_chunks(h5py: Any, group: Any) -> None:
    del group["reward"]
    group.create_dataset("reward", (5,), "f8", maxshape=(None,), chunks=(1 << 29,))


def _nested(h5py: Any, group: Any) -> None:
    del group["observation"]
    group["observation/" + "/".join(map(str, range(60)))] = np.zeros((6, 2))


def _circle(h5py: Any, group: Any) -> None:
    del group["observation"]
    inner = group.create_group("observation")
    inner["again"] = inner  # a hard link to itself


HDF5: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "external link": (lambda h5py, g: _replace(g, "reward", h5py.ExternalLink("/tmp/x.hdf5", "/y")), "is a link"),
    "soft link": (lambda h5py, g: _replace(g, "reward", h5py.SoftLink("/episode_0/action")), "is a link"),
    "external data": (_external_data, "lies in another file"),
    "virtual data": (_virtual, "lies in another file"),
    "a reference": (
        lambda h5py, g: _replace(g, "action", np.array([g["reward"].ref] * 5, h5py.ref_dtype)),
        "not plain numbers",
    ),
    "texts of any length": (
        lambda h5py, g: _replace(g, "action", np.array(["a"] * 5, h5py.string_dtype())),
        "not plain numbers",
    ),
    "nothing on disk": (_empty_huge, "would unpack to"),
    "huge chunks": (_huge_chunks, "more than"),
    "deep groups": (_nested, "nested too deeply"),
    "a circle": (_circle, "nested too deeply"),
    "a group for an array": (
        lambda h5py, g: (_replace(g, "x", 1) if "x" in g else None, g.__delitem__("reward"), g.create_group("reward")),
        "no array",
    ),
    "a scalar": (lambda h5py, g: _replace(g, "reward", 1.0), "no array with rows"),
}


@pytest.mark.parametrize("case", HDF5)
def test_hdf5(case: str, tmp_path: Path) -> None:
    change, match = HDF5[case]
    _hdf5(tmp_path, change)
    refused(tmp_path, match)


def test_hdf5_an_episode_that_is_a_link(tmp_path: Path) -> None:
    def change(h5py: Any, group: Any) -> None:
        group.file["episode_1"] = h5py.ExternalLink("/tmp/other.hdf5", "/")

    _hdf5(tmp_path, change)
    refused(tmp_path, "is a link")


@pytest.mark.parametrize("data", [b"", b"\x89HDF\r\n\x1a\n" + bytes(3000), b"x" * 5000])
def test_hdf5_no_such_file(data: bytes, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    (tmp_path / "a.hdf5").write_bytes(data)
    refused(tmp_path, "cannot be read")


# -- zarr --------------------------------------------------------------------------------------------------------------


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change the metadata of the reward."""

    def edit(group: Path) -> None:
        path = group / "reward" / "zarr.json"
        about = json.loads(path.read_text())
        change(about)
        path.write_text(json.dumps(about))

    return edit


def _text(text: str) -> Callable[[Path], None]:
    def write(group: Path) -> None:
        (group / "reward" / "zarr.json").write_text(text)

    return write


def _chunks(size: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": [size]}}


def _link(group: Path) -> None:
    for path in [*(group / "action").rglob("*")]:
        if path.is_file() and path.name != "zarr.json":
            path.unlink()
            path.symlink_to("/etc/hostname")


ZARR: dict[str, tuple[Callable[[Path], None], str]] = {
    "chunks of 2^40": (_edit(lambda about: about.update(chunk_grid=_chunks(1 << 40))), "a chunk"),
    "2^40 chunks": (_edit(lambda about: about.update(shape=[1 << 40], chunk_grid=_chunks(1))), "more than 1000000"),
    "2^40 rows": (_edit(lambda about: about.update(shape=[1 << 40], chunk_grid=_chunks(1 << 26))), "more than"),
    "no chunks": (_edit(lambda about: about.update(chunk_grid=_chunks(0))), "chunks"),
    "chunks of text": (_edit(lambda about: about.update(chunk_grid={"configuration": "x"})), "chunks"),
    "another version": (_edit(lambda about: about.update(zarr_format=2)), "no array of zarr v3"),
    "texts": (_edit(lambda about: about.update(data_type="string")), "not plain numbers"),
    "an unknown codec": (
        _edit(lambda about: about["codecs"].append({"name": "numcodecs.pickle", "configuration": {}})),
        "codec 'numcodecs.pickle'",
    ),
    "codecs in codecs": (
        _edit(
            lambda about: about.update(
                codecs=[{"name": "sharding_indexed", "configuration": {"codecs": [{"name": "pickle"}]}}]
            )
        ),
        "codec 'pickle'",
    ),
    "codecs of text": (_edit(lambda about: about.update(codecs="zstd")), "names no codecs"),
    "deep JSON": (_text("[" * 200_000), "nested too deeply"),
    "deep attributes": (_text('{"attributes": ' + '{"a":' * 100_000), "nested too deeply"),
    "much JSON": (_text('{"a": "' + "x" * (2 << 20) + '"}'), "larger than"),
    "no JSON": (_text("x"), "no valid JSON"),
    "a link": (_link, "is a link"),
}


@pytest.mark.parametrize("case", ZARR)
def test_zarr(case: str, tmp_path: Path) -> None:
    change, match = ZARR[case]
    _write("zarr", tmp_path, arrays())
    change(tmp_path / "episode_0")
    refused(tmp_path, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"columns": ["../../etc"]}, "no experience segment"),
        ({"columns": ["observation", "observation"]}, "no experience segment"),
        ({"rows": -1}, "no experience segment"),
        ({"schema": 99}, "schema 99"),
        ({"rows": 10**9}, ""),
    ],
)
def test_segments_that_lie(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    from test_round_trips import segment_of

    segment_of(random_recording(IMAGE), tmp_path / "segment.zarr")
    path = tmp_path / "segment.zarr" / "zarr.json"
    about = json.loads(path.read_text())
    about["attributes"] |= change
    path.write_text(json.dumps(about))
    refused(tmp_path / "segment.zarr", match)


# -- Minari ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def minari(tmp_path: Path) -> Path:
    pytest.importorskip("h5py")
    write_recording(random_recording(SPACES["image"]), "minari", tmp_path / "minari")
    return tmp_path / "minari"


def _metadata(folder: Path, **changes: Any) -> None:
    path = folder / "data" / "metadata.json"
    about = json.loads(path.read_text())
    about = {key: value for key, value in (about | changes).items() if value is not None}
    path.write_text(json.dumps(about))


BOX = {"type": "Box", "dtype": "uint8", "shape": [40, 40, 3], "low": 0, "high": 255}
MINARI: dict[str, tuple[dict[str, Any], str]] = {
    "arrow": ({"data_format": "arrow"}, "only hdf5 is read"),
    "no spaces": ({"observation_space": None, "wm": None}, "has no observation_space"),
    "deep spaces": ({"observation_space": '{"type":"Tuple","subspaces":[' * 50_000}, "nested too deeply"),
    "deep JSON in text": ({"observation_space": "[" * 200_000}, "nested too deeply"),
    "a graph": ({"observation_space": '{"type": "Graph"}'}, "a space of type Graph"),
    "no text": ({"observation_space": {"type": "Box"}}, "has no observation_space"),
    "a list": ({"action_space": "[]"}, "cannot be read"),
    "actions of parts": (
        {"action_space": json.dumps({"type": "Tuple", "subspaces": [{"type": "Discrete", "n": 2}] * 2})},
        "actions of several parts",
    ),
    "paths": (
        {"wm": None, "observation_space": json.dumps({"type": "Dict", "subspaces": {"../../rewards": BOX}})},
        "",
    ),
    "other spaces of wm": ({"wm": {"spaces": {"size": 41, "actions": 3}}}, "not (41, 41, 3)"),
    "what was repeated": ({"wm": {"spaces": {"size": 40, "actions": 3}, "repeated": 7}}, "no list of episodes"),
}


@pytest.mark.parametrize("case", MINARI)
def test_minari(case: str, minari: Path) -> None:
    changes, match = MINARI[case]
    _metadata(minari, **changes)
    refused(minari, match)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\xff\xd8\xff" + bytes(50), "damaged"),
        (b"GIF89a" + bytes(50), "damaged"),
        (b"", "damaged"),
        ("large", "pixels, not"),
    ],
)
def test_minari_images_that_are_none(data: bytes | str, match: str, minari: Path) -> None:
    import h5py

    if data == "large":
        buffer = io.BytesIO()
        Image.new("RGB", (9000, 9000)).save(buffer, "JPEG")
        data = buffer.getvalue()
    assert isinstance(data, bytes)
    with h5py.File(minari / "data" / "main_data.hdf5", "a") as file:
        for group in file.values():
            rows = len(group["observations"])
            del group["observations"]
            stored = group.create_dataset("observations", (rows,), h5py.vlen_dtype(np.uint8))
            for row in range(rows):
                stored[row] = np.frombuffer(data, np.uint8)
    refused(minari, match)


@pytest.mark.parametrize(
    "name", ["minari:../../etc", "minari:/etc/passwd", "minari:", "minari:a b", "minari:no/such-v0"]
)
def test_minari_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no name of a Minari dataset|no such dataset; fetch it with: minari download"):
        open_recording(name)


# -- LeRobot -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def lerobot(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow")
    write_recording(random_recording(SPACES["image"]), "lerobot", tmp_path / "lerobot")
    return tmp_path / "lerobot"


def _info(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "meta" / "info.json"
        about = json.loads(path.read_text())
        change(about)
        path.write_text(json.dumps(about))

    return edit


def _table(name: str, **columns: Callable[[list], list]) -> Callable[[Path], None]:
    """Change columns of a parquet file."""

    def edit(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pq.read_table(folder / name)
        for key, change in columns.items():
            key = key.replace("__", "/").replace("_dot_", ".")
            values = change(table.column(key).to_pylist())
            table = table.set_column(table.schema.get_field_index(key), key, pa.array(values))
        pq.write_table(table, folder / name)

    return edit


def _bomb(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "data/chunk-000/file-000.parquet"
    zeros = pa.array(np.zeros(25_000_000, np.int8))
    columns = dict.fromkeys(pq.read_schema(path).names, zeros)
    pq.write_table(pa.table(columns), path, compression="zstd")


def _outside(folder: Path) -> None:
    shutil.move(folder / "data/chunk-000/file-000.parquet", folder.parent / "rows.parquet")
    (folder / "data/chunk-000/file-000.parquet").symlink_to(folder.parent / "rows.parquet")


def _no_text(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(folder / DATA)
    name = "observation.image"
    length = len(table)
    paths = pa.array([b"\xe6"] * length).buffers()
    struct = pa.StructArray.from_arrays(
        [pa.array([b"x"] * length), pa.Array.from_buffers(pa.string(), length, paths)], ["bytes", "path"]
    )
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, struct), folder / DATA)


DATA, PLACES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
LEROBOT: dict[str, tuple[Callable[[Path], None], str]] = {
    "version 2": (_info(lambda about: about.update(codebase_version="v2.1")), "only v3 is read"),
    "no features": (_info(lambda about: about.pop("features")), "has no features"),
    "no action": (_info(lambda about: about["features"].pop("action")), "needs the features action"),
    "a feature of text": (_info(lambda about: about["features"].update(action="x")), "no dtype and shape"),
    "a shape of 2^40": (_info(lambda about: about["features"]["action"].update(shape=[1 << 40])), "has shape"),
    "another shape": (_info(lambda about: about["features"]["action"].update(shape=[7])), "rows of (7,)"),
    "an absolute path": (_info(lambda about: about.update(data_path="/etc/{chunk_index}")), "no path inside"),
    "a path that leaves": (_info(lambda about: about.update(data_path="../{chunk_index:03d}")), "leads out of"),
    "a template with attributes": (
        _info(lambda about: about.update(data_path="{chunk_index.__class__}")),
        "no template of a path",
    ),
    "a template of a gigabyte": (
        _info(lambda about: about.update(data_path="{chunk_index:0999999999d}")),
        "no template of a path",
    ),
    "a file that leaves": (_outside, "leads out of its folder"),
    "a missing file": (lambda folder: (folder / DATA).unlink(), "file-000.parquet"),
    "no parquet": (lambda folder: (folder / DATA).write_bytes(b"PAR1" * 100), "cannot be read"),
    "a bomb": (_bomb, "would unpack to"),
    "no episodes": (lambda folder: (folder / PLACES).unlink(), "no episodes"),
    "a longer episode": (_table(PLACES, length=lambda values: [9999] * len(values)), "rows of episode"),
    "a negative place": (_table(PLACES, data__chunk_index=lambda values: [-1] * len(values)), "no place"),
    "a place of text": (_table(PLACES, data__chunk_index=lambda values: ["../x"] * len(values)), "no place"),
    "frames twice": (_table(DATA, frame_index=lambda values: [0] * len(values)), "does not count from 0"),
    "images of nothing": (
        _table(DATA, observation_dot_image=lambda values: [{"bytes": b"", "path": ""}] * len(values)),
        "damaged",
    ),
    "images elsewhere": (
        _table(DATA, observation_dot_image=lambda values: [{"bytes": None, "path": "/etc/passwd"}] * len(values)),
        "no path inside",
    ),
    "a name that is no text": (_no_text, "cannot be read: 'utf-8'"),
    "missing values": (_table(DATA, action=lambda values: [None] * len(values)), "missing values"),
    "an image of text": (_table(DATA, observation_dot_image=lambda values: ["x"] * len(values)), "no image files"),
}


@pytest.mark.parametrize("case", LEROBOT)
def test_lerobot(case: str, lerobot: Path) -> None:
    change, match = LEROBOT[case]
    change(lerobot)
    refused(lerobot, match)


# -- MP4 ---------------------------------------------------------------------------------------------------------------

TABLE = "action,reward\n0,1\n1,0\n"
PLAYLIST = "#EXTM3U\n#EXTINF:1,\n/etc/hostname\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("table", "video", "match"),
    [
        (TABLE, b"nothing", "no MP4 video"),
        (TABLE, b"", "no MP4 video"),
        (TABLE, PLAYLIST.encode(), "no MP4 video"),
        (TABLE, b"gif", "no MP4 video"),
        (TABLE, b"ffconcat version 1.0\nfile '/etc/hostname'\n", "no MP4 video"),
        ("action\n0\n", b"", "needs the columns action"),
        ("reward\n0\n", b"", "needs the columns action"),
        ("", b"", "needs the columns action"),
        ("action,action,reward\n0,0,0\n", b"", "each once"),
        ("action,reward\n0\n", b"", "line 2 has 1 cells"),
        ("action,reward\nx,0\n", b"", "cannot be read"),
        ("action,reward\n0,nan\n0,0\n0,0\n", b"good", "NaN"),
        ("episode,action,reward\nb,0,0\n", b"", "has no video"),
        ("episode,action,reward\n../a,0,0\n", b"", "has no video"),
        ("episode,action,reward\na,0,0\n" + "a,0,0\n" * 9, b"good", "4 observations for 10 actions"),
        (TABLE, b"good", "4 observations for 2 actions"),
    ],
)
def test_mp4(table: str, video: bytes, match: str, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    from wmcli.exchange.video import encode

    (tmp_path / "actions.csv").write_text(table)
    if video == b"good":
        encode(tmp_path / "a.mp4", iter(np.zeros((4, 32, 32, 3), np.uint8)), (32, 32), 10)
    elif video == b"gif":  # which ffmpeg would read
        frames = [Image.new("RGB", (32, 32), (60 * n, 0, 0)) for n in range(3)]
        frames[0].save(tmp_path / "a.mp4", "GIF", save_all=True, append_images=frames[1:])
    else:
        (tmp_path / "a.mp4").write_bytes(video)
    refused(tmp_path, match)


# -- paths -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["zarr", "mp4", "minari", "lerobot"])
def test_a_file_in_place_of_a_folder(form: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    refused(tmp_path / "x", "but " + form + " is a folder", form=form)


def test_nothing_there_or_nothing_known(tmp_path: Path) -> None:
    refused(tmp_path / "missing", "no such file or folder")
    refused(tmp_path, "name it with --from")
    (tmp_path / "x.txt").write_text("")
    refused(tmp_path / "x.txt", "name it with --from")
    refused(tmp_path, "no npz files", form="npz")
    refused(tmp_path, "no HDF5 files", form="hdf5")
