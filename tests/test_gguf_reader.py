"""GGUF reader: real files against gguf-py, round trips, split sets, and damaged files in every field."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slimserve
from slimserve.errors import FormatError, UsageError
from slimserve.quant.formats import F16, F32, I32, Q4_K, Q8_0
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.gguf import GgufFile
from slimserve.weights.gguf_write import TensorPlan, write_gguf

CACHE = Path(os.environ.get("SLIMSERVE_CACHE", Path.home() / ".cache" / "slimserve")) / "models"
REAL_FILES = [
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m-q4_k_m.gguf",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
]


def real_file(name: str) -> Path:
    path = CACHE / name
    if not path.exists():
        pytest.skip(f"{path} is absent: `make test` fetches it")
    return path


def small_tensors() -> list[PackedTensor]:
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(3, 5, generator=generator)
    q8 = torch.randint(0, 256, (4, 68), dtype=torch.uint8, generator=generator)
    q4k = torch.randint(0, 256, (2, 3, 144), dtype=torch.uint8, generator=generator)
    return [
        PackedTensor(F32, (3, 5), plain, "plain"),
        PackedTensor(F16, (7,), plain.reshape(-1)[:7].half(), "half"),
        PackedTensor(Q8_0, (4, 64), q8, "matrix"),
        PackedTensor(Q4_K, (2, 3, 256), q4k, "experts"),
        PackedTensor(I32, (2, 2), torch.tensor([[1, -2], [3, 4]], dtype=torch.int32), "table"),
    ]


def small_metadata() -> dict[str, Any]:
    return {
        "general.architecture": "toy",
        "toy.flag": True,
        "toy.count": 7,
        "toy.negative": -3,
        "toy.large": 1 << 40,
        "toy.ratio": 0.5,
        "toy.wide": np.float64(1 / 3),
        "tokenizer.ggml.tokens": ["a", "", "日本", "\udcff\udcfe", "x" * 300],
        "tokenizer.ggml.scores": np.array([0.0, -1.5, 2.0], dtype=np.float32),
        "toy.kinds": [1, 2, 3],
        "toy.flags": np.array([True, False]),
        "toy.empty": [],
    }


def write_small(path: Path) -> bytes:
    write_gguf(path, small_metadata(), [TensorPlan.of(tensor) for tensor in small_tensors()])
    return path.read_bytes()


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    write_small(path)
    file = GgufFile.open(path)
    assert file.architecture == "toy" and file.version == 3
    for key, value in small_metadata().items():
        read = file.metadata[key]
        if isinstance(value, (np.ndarray, list)):
            assert list(read) == list(value), key
        else:
            assert read == value and type(read) is type(np.asarray(value).item()), key
    for tensor in small_tensors():
        info, packed = file.tensors[tensor.name], file.packed(tensor.name)
        assert info.shape == tensor.shape == packed.shape and info.format is tensor.format
        assert info.offset % 32 == 0 and info.num_bytes == tensor.num_bytes
        assert packed.data.dtype == tensor.data.dtype and torch.equal(packed.data, tensor.data)
    assert file.type_counts == {"F32": 1, "F16": 1, "Q8_0": 1, "Q4_K": 1, "I32": 1}
    with pytest.raises(FormatError, match="no tensor 'absent'"):
        file.packed("absent")


def test_a_copy_keeps_widths(tmp_path: Path) -> None:
    source, target = tmp_path / "a.gguf", tmp_path / "b.gguf"
    metadata = {"general.architecture": "toy", "toy.u64": np.uint64(5), "toy.i32": np.int32(5), "toy.u8": np.uint8(1)}
    metadata["toy.array"] = np.array([1, 2], dtype=np.uint16)
    write_gguf(source, metadata, [TensorPlan.of(tensor) for tensor in small_tensors()])
    first = GgufFile.open(source)
    plans = [TensorPlan.of(first.packed(name)) for name in first.tensors]
    write_gguf(target, first.metadata, plans, value_types=first.value_types)
    assert source.read_bytes() == target.read_bytes()


def test_views_are_zero_copy_and_private(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    before = write_small(path)
    file = GgufFile.open(path)
    first, second = file.packed("matrix").data, file.packed("matrix").data
    assert first.data_ptr() == second.data_ptr()
    first.fill_(7)
    assert path.read_bytes() == before
    del file, second
    assert int(first[0, 0]) == 7


@pytest.mark.parametrize("name", REAL_FILES)
def test_real_file_against_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    path = real_file(name)
    start = time.perf_counter()
    file = GgufFile.open(path)
    print(f"header of {name}: {time.perf_counter() - start:.3f} s")
    reader = gguf.GGUFReader(str(path))
    assert [tensor.name for tensor in reader.tensors] == list(file.tensors)
    for theirs in reader.tensors:
        mine = file.tensors[theirs.name]
        assert mine.shape == tuple(int(n) for n in reversed(theirs.shape))
        assert (mine.format.type_id, mine.offset) == (int(theirs.tensor_type), int(theirs.data_offset))
        assert mine.num_bytes == int(theirs.n_bytes)
    keys = {key for key in reader.fields if not key.startswith("GGUF.")}
    assert keys == set(file.metadata)
    for key in keys:
        theirs, mine = reader.fields[key].contents(), file.metadata[key]
        assert list(mine) == list(theirs) if isinstance(theirs, list) else mine == theirs, key


def split_set(folder: Path, count: int = 3) -> list[Path]:
    paths = []
    tensors = small_tensors()
    for index in range(count):
        keys: dict[str, Any] = {"split.no": np.uint16(index), "split.count": np.uint16(count)}
        keys["split.tensors.count"] = np.int32(len(tensors))
        metadata = small_metadata() | keys if index == 0 else keys
        path = folder / f"toy-{index + 1:05d}-of-{count:05d}.gguf"
        write_gguf(path, metadata, [TensorPlan.of(t) for t in tensors[index::count]])
        paths.append(path)
    return paths


def test_split_set_opens_from_any_shard(tmp_path: Path) -> None:
    for path in split_set(tmp_path):
        file = GgufFile.open(path)
        assert file.architecture == "toy" and len(file.tensors) == 5
        for tensor in small_tensors():
            assert torch.equal(file.packed(tensor.name).data, tensor.data)


def test_split_set_refusals(tmp_path: Path) -> None:
    paths = split_set(tmp_path)
    third = paths[2].read_bytes()
    paths[2].unlink()
    with pytest.raises(FormatError, match=r"missing beside it: toy-00003-of-00003\.gguf"):
        GgufFile.open(paths[0])
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(FormatError, match="holds shard 2 under the name of shard 3"):
        GgufFile.open(paths[0])
    paths[2].write_bytes(third)
    single = tmp_path / "renamed.gguf"
    single.write_bytes(paths[0].read_bytes())
    with pytest.raises(FormatError, match="one of 3 files, but its name says 1"):
        GgufFile.open(single)
    with pytest.raises(FormatError, match="not a possible name"):
        GgufFile.open(tmp_path / "toy-00004-of-00003.gguf")


FOREIGN = [
    (b"", "empty"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "Git-LFS pointer"),
    (b"<!DOCTYPE html><html></html>", "web page"),
    (b"PK\x03\x04" + bytes(60), "zip archive"),
    (b"\x10\x00\x00\x00\x00\x00\x00\x00" + b'{"a": 1}' + bytes(30), "safetensors"),
    (b"ABCDEFGHIJ" * 10, "unknown kind"),
    (b"GG", "unknown kind"),
    (b"GGUF", "truncated"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    (b"GGUF" + struct.pack("<III", 1, 0, 0), "version 1"),
    (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0), "9223372036854775808 tensors"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), "9223372036854775808 keys"),
]


@pytest.mark.parametrize(("content", "message"), FOREIGN, ids=[message for _, message in FOREIGN])
def test_foreign_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message) as caught:
        GgufFile.open(path)
    assert "bad.gguf" in str(caught.value)


def test_absent_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        GgufFile.open(tmp_path / "absent.gguf")
    with pytest.raises(FormatError, match="not a regular file"):
        GgufFile.open(tmp_path)


def build(keys: bytes = b"", num_keys: int = 0, tensors: bytes = b"", num_tensors: int = 0, data: int = 64) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + keys + tensors
    return header + bytes(-len(header) % 32) + bytes(data)


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def describe(name: str, sizes: list[int], type_id: int, offset: int) -> bytes:
    head = text(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    return head + struct.pack("<IQ", type_id, offset)


U32_KEY = text("k") + struct.pack("<II", 4, 5)
HUGE_STRING = text("k") + struct.pack("<IQ", 8, 1 << 62)
HUGE_ARRAY = text("k") + struct.pack("<IIQ", 9, 4, 1 << 61)
HUGE_STRINGS = text("k") + struct.pack("<IIQ", 9, 8, 1 << 60)
NESTED_ARRAY = text("k") + struct.pack("<IIQ", 9, 9, 1)
ALIGNMENT_3 = text("general.alignment") + struct.pack("<II", 4, 3)
DAMAGED: list[tuple[bytes, str]] = [
    (build(U32_KEY * 2, 2), "key 'k' appears twice"),
    (build(HUGE_STRING, 1), "value of 'k' claims 4611686018427387904 bytes"),
    (build(HUGE_ARRAY, 1), "array 'k' of 2305843009213693952 items"),
    (build(HUGE_STRINGS, 1), "claims 1152921504606846976 strings"),
    (build(NESTED_ARRAY, 1), "array of arrays"),
    (build(text("k") + struct.pack("<I", 77) + bytes(8), 1), "unknown value type 77"),
    (build(struct.pack("<Q", 0) + struct.pack("<II", 4, 5) + bytes(8), 1), "key is empty"),
    (build(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 5), 1), "not UTF-8"),
    (build(ALIGNMENT_3, 1), "general.alignment is 3"),
    (build(tensors=describe("w", [4], 0, 0) * 2, num_tensors=2), "'w' appears twice"),
    (build(tensors=describe("w", [], 0, 0) + bytes(8), num_tensors=1), "'w' has 0 dimensions"),
    (build(tensors=describe("w", [1] * 5, 0, 0), num_tensors=1), "'w' has 5 dimensions"),
    (build(tensors=describe("w", [4, 0], 0, 0), num_tensors=1), "'w' has a zero dimension"),
    (build(tensors=describe("w", [4], 999, 0), num_tensors=1), r"'w' has type unknown \(id 999\)"),
    (build(tensors=describe("w", [4], 4, 0), num_tensors=1), r"'w' has type Q4_2 \(id 4\).*supported are F32"),
    (build(tensors=describe("w", [128], 41, 0), num_tensors=1), r"'w' has type Q1_0 \(id 41\)"),
    (build(tensors=describe("w", [33], 8, 0), num_tensors=1), "'w': rows of 33 are no whole blocks of 32"),
    (build(tensors=describe("w", [1 << 62, 1 << 62], 0, 0), num_tensors=1), "more than the whole file"),
    (build(tensors=describe("w", [4], 0, 1 << 40), num_tensors=1), "'w' ends at byte"),
    (build(tensors=describe("w", [4], 0, 7), num_tensors=1), "'w' lies at 7, not a multiple of 32"),
    (build(tensors=describe("v", [16], 0, 0) + describe("w", [4], 0, 32), num_tensors=2), "'v' and 'w' overlap"),
]


@pytest.mark.parametrize(("content", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_damaged_fields(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message) as caught:
        GgufFile.open(path)
    assert "bad.gguf" in str(caught.value)


def test_truncated_anywhere(tmp_path: Path) -> None:
    """Every prefix of a file is refused, and says that it is short where it still looks like GGUF."""
    path = tmp_path / "cut.gguf"
    whole = write_small(tmp_path / "toy.gguf")
    last = max(info.offset + info.num_bytes for info in GgufFile.open(tmp_path / "toy.gguf").tensors.values())
    for length in range(last):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            GgufFile.open(path)
    path.write_bytes(whole[:last])
    GgufFile.open(path)


def mutate(rng: random.Random, whole: bytes) -> bytes:
    """One to four damages: bytes, bits, whole 4- and 8-byte fields, cuts, insertions, swapped ranges."""
    data = bytearray(whole)
    extremes = [0, 1, 2, 7, 31, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1]
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        kind = rng.randrange(7)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + 4] = struct.pack("<I", rng.choice(extremes) & 0xFFFFFFFF)
        elif kind == 3:
            data[at : at + 8] = struct.pack("<Q", rng.choice(extremes))
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at:at] = rng.randbytes(rng.randint(1, 16))
        else:
            source = rng.randrange(len(data))
            data[at : at + 8] = data[source : source + 8]
        if not data:
            data = bytearray(b"G")
    return bytes(data)


def test_fuzz(tmp_path: Path) -> None:
    """12,000 damaged files: each is refused with FormatError or opens with every tensor inside the file."""
    path = tmp_path / "fuzz.gguf"
    whole = write_small(tmp_path / "toy.gguf")
    header_end = min(info.offset for info in GgufFile.open(tmp_path / "toy.gguf").tensors.values())
    rng = random.Random(20260101)
    opened = 0
    for _ in range(12_000):
        header = mutate(rng, whole[:header_end])
        path.write_bytes(header + whole[header_end:] if rng.random() < 0.9 else header)
        try:
            file = GgufFile.open(path)
        except FormatError as error:
            assert "fuzz.gguf" in str(error)
            continue
        opened += 1
        for name, info in file.tensors.items():
            assert info.offset + info.num_bytes <= path.stat().st_size
            assert file.packed(name).data.numel() > 0
    assert 0 < opened < 12_000
    print(f"{opened} of 12000 damaged files still open")


MEASURE = """
import sys
from slimserve.errors import FormatError
from slimserve.weights.gguf import GgufFile
try:
    GgufFile.open(sys.argv[1])
except FormatError as error:
    print(error, file=sys.stderr)
lines = open("/proc/self/status").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory of a process is read from /proc")
@pytest.mark.parametrize("case", ["empty strings", "short strings", "tensors", "long string"])
def test_memory_of_hostile_headers(tmp_path: Path, case: str) -> None:
    """Headers that cost the most memory per byte stay under 500 MB for the whole process, torch included."""
    strings = text("k") + struct.pack("<IIQ", 9, 8, 20_000_000 if case == "empty strings" else 1_400_000)
    descriptions = (describe(f"t{i}", [1, 1, 1, 1], 0, 32 * i) for i in range(120_000)) if case == "tensors" else ()
    content = {
        "empty strings": lambda: build(strings, 1) + bytes(160_000_000),
        "short strings": lambda: build(strings + text("é" * 10) * 1_400_000, 1),
        "tensors": lambda: build(tensors=b"".join(descriptions), num_tensors=120_000, data=32 * 120_000),
        "long string": lambda: build(text("k") + struct.pack("<I", 8) + text("x" * (9 << 20) + "😀" * (7 << 20)), 1),
    }[case]()
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    environment = os.environ | {"PYTHONPATH": str(Path(slimserve.__file__).parents[1])}
    start = time.perf_counter()
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    peak = int(done.stdout) >> 10
    print(f"{case}: {peak} MB, {time.perf_counter() - start:.1f} s {done.stderr[-100:].strip()}")
    assert peak < 500
    assert ("past" in done.stderr) == (case == "empty strings")
