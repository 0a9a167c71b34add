"""Safetensors reader and writer: against the safetensors package, sharded folders, damaged files."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from nano_models import PACKAGED, QWEN

from slimserve.errors import FormatError, UsageError
from slimserve.weights.chat_template import chat_template_from_folder
from slimserve.weights.safetensors import DTYPES, INDEX_NAME, SafetensorsFolder
from slimserve.weights.safetensors_write import StoredPlan, write_safetensors
from slimserve.weights.source import open_source
from slimserve.weights.tokenizer import tokenizer_from_folder


def small_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(4, 6, generator=generator) * 3
    return {
        "f32": values,
        "bf16": values.bfloat16(),
        "f16": values.half()[0],
        "fp8": values.to(torch.float8_e4m3fn),
        "u8": torch.arange(7, dtype=torch.uint8),
        "i32": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "i64": torch.tensor([[-(1 << 60)]]),
        "scalar": torch.tensor(2.5),
        "flag": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 5),
    }


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return left.numel() == 0 or torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def write_small(path: Path) -> bytes:
    write_safetensors(path, [StoredPlan.of(name, tensor) for name, tensor in small_tensors().items()], {"format": "pt"})
    return path.read_bytes()


def test_round_trip_and_the_package(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    write_small(ours)
    package.save_file(small_tensors(), theirs)
    read_by_package = package.load_file(ours)
    for path in (ours, theirs):
        folder = SafetensorsFolder.open(path)
        assert set(folder.tensors) == set(small_tensors())
        for name, tensor in small_tensors().items():
            assert same(folder.tensor(name), tensor), name
            assert same(read_by_package[name], tensor), name
    assert SafetensorsFolder.open(ours).packed("fp8").format.name == "F8_E4M3"
    with pytest.raises(FormatError, match="'u8' of U8 is no plain weight"):
        SafetensorsFolder.open(ours).packed("u8")
    with pytest.raises(FormatError, match="no tensor 'absent'"):
        SafetensorsFolder.open(ours).tensor("absent")


def test_views_are_zero_copy_and_private(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    before = write_small(path)
    folder = SafetensorsFolder.open(path)
    view = folder.tensor("f32")
    assert view.data_ptr() == folder.tensor("f32").data_ptr()
    view.fill_(1)
    assert path.read_bytes() == before


def raw_file(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def test_odd_placement_is_copied(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header["b"] = {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}
    for pad in range(4):
        path = tmp_path / f"odd{pad}.safetensors"
        path.write_bytes(raw_file(json.dumps(header).encode() + b" " * pad, b"\x07" + values.numpy().tobytes()))
        assert torch.equal(SafetensorsFolder.open(path).tensor("b"), values)


def sharded(folder: Path, *, index: bool = True) -> dict[str, str]:
    names = list(small_tensors())
    weight_map = {}
    for shard in range(3):
        name = f"model-{shard + 1:05d}-of-00003.safetensors"
        part = names[shard::3]
        write_safetensors(folder / name, [StoredPlan.of(item, small_tensors()[item]) for item in part])
        weight_map |= dict.fromkeys(part, name)
    if index:
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"}))
    return weight_map


@pytest.mark.parametrize("index", [True, False])
def test_sharded_folder(tmp_path: Path, index: bool) -> None:
    sharded(tmp_path, index=index)
    folder = SafetensorsFolder.open(tmp_path)
    assert folder.config == {"model_type": "toy"} and folder.json("generation_config.json") is None
    for name, tensor in small_tensors().items():
        assert same(folder.tensor(name), tensor), name
    extra = torch.ones(3)
    write_safetensors(tmp_path / "model_mtp.safetensors", [StoredPlan.of("mtp.fc.weight", extra)])
    assert same(SafetensorsFolder.open(tmp_path).tensor("mtp.fc.weight"), extra)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FormatError, match=r"missing: model-00002-of-00003\.safetensors"):
        SafetensorsFolder.open(tmp_path)


def test_index_refusals(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    index = tmp_path / INDEX_NAME

    def refused(content: Any, message: str) -> None:
        index.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(FormatError, match=message):
            SafetensorsFolder.open(tmp_path)

    refused({"weight_map": weight_map | {"ghost": "model-00001-of-00003.safetensors"}}, "'ghost' is not in model-00001")
    refused({"weight_map": weight_map | {"f32": "../f.safetensors"}}, "'f32' lies in '../f.safetensors'")
    refused({"weight_map": {}}, "'weight_map' is missing or empty")
    refused("[" * 100_000, "not valid JSON")
    refused("[]", "holds a list")
    refused('{"weight_map": {"a": "b", "a": "b"}}', "'a' appears twice")
    index.unlink()
    write_safetensors(tmp_path / "other.safetensors", [StoredPlan.of("x", torch.ones(1))])
    with pytest.raises(UsageError, match="4 safetensors files and no"):
        SafetensorsFolder.open(tmp_path)


def test_repeated_tensor_across_files(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        write_safetensors(tmp_path / name, [StoredPlan.of("x", torch.ones(1))])
    with pytest.raises(FormatError, match=r"'x' is already in model-00001-of-00002"):
        SafetensorsFolder.open(tmp_path)


def test_absent_paths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        SafetensorsFolder.open(tmp_path / "absent")
    with pytest.raises(UsageError, match="holds no safetensors file"):
        SafetensorsFolder.open(tmp_path)


COMPANIONS = [
    "config.json",
    INDEX_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
]
"""Every small file of a model folder that anything reads."""


def open_everything(folder: Path) -> None:
    """What loading reads of a folder besides its tensors."""
    source = open_source(folder)
    tokenizer = tokenizer_from_folder(source.folder)
    chat_template_from_folder(source.folder, tokenizer)


def nano_folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for file in (PACKAGED / QWEN).iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    return tmp_path / "model"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "endless"])
@pytest.mark.parametrize("name", COMPANIONS)
@pytest.mark.timeout(60)
def test_companions_that_are_no_files(tmp_path: Path, name: str, kind: str) -> None:
    folder = nano_folder(tmp_path)
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).touch()
        os.truncate(folder / name, 1 << 40)
    words = {"folder": "cannot be read: it is a folder", "endless": "more than the"}.get(kind, "is not a regular file")
    with pytest.raises((FormatError, UsageError), match=words) as raised:
        open_everything(folder)
    assert name in str(raised.value)


def entry(dtype: Any = "F32", shape: Any = (2,), span: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


DAMAGED: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b"GGUF" + bytes(40), "a GGUF file"),
    (b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer"),
    (b"abc", "unknown kind"),
    (struct.pack("<Q", 1 << 63) + b"{}", "claims 9223372036854775808 bytes"),
    (struct.pack("<Q", 50) + b"{}", "truncated"),
    (raw_file(b"{"), "not valid JSON"),
    (raw_file(b'{"a": \xff}'), "not UTF-8"),
    (raw_file(b'{"a": ' + b"[" * 50_000), "not valid JSON"),
    (raw_file(b'{"a": 1' + b"0" * 10_000 + b"}"), "not valid JSON"),
    (raw_file(b'{"a": {}, "a": {}}'), "'a' appears twice"),
    (raw_file({"a": 3}), "'a' is described by a int"),
    (raw_file({"a": entry(dtype="F4")}, bytes(8)), "'a' has dtype 'F4'"),
    (raw_file({"a": entry(dtype=["F32"])}, bytes(8)), "'a' has dtype"),
    (raw_file({"a": entry(shape=[-2])}, bytes(8)), "'a' has no proper shape"),
    (raw_file({"a": entry(shape=[True, 2])}, bytes(8)), "'a' has no proper shape"),
    (raw_file({"a": entry(shape="2")}, bytes(8)), "'a' has no proper shape"),
    (raw_file({"a": entry(shape=[1] * 99)}, bytes(8)), "'a' has no proper shape"),
    (raw_file({"a": entry(span=[8, 0])}, bytes(8)), "'a' has no proper data_offsets"),
    (raw_file({"a": entry(span=[0, 8.0])}, bytes(8)), "'a' has no proper data_offsets"),
    (raw_file({"a": entry(shape=[3])}, bytes(8)), "needs 12 bytes but data_offsets span 8"),
    (raw_file({"a": entry(shape=[1 << 62, 1 << 62])}, bytes(8)), "'a' .* needs"),
    (raw_file({"a": entry(span=[1 << 40, (1 << 40) + 8])}, bytes(8)), "'a' ends at byte"),
    (raw_file({"a": entry()}, bytes(7)), "truncated"),
    (raw_file({"a": entry(), "b": entry(span=[4, 12])}, bytes(12)), "'a' and 'b' overlap"),
    (raw_file({"a": entry(), "b": entry(span=[12, 20])}, bytes(20)), "belong to no tensor"),
    (raw_file({"a": entry()}, bytes(9)), "1 bytes after the last tensor"),
    (raw_file({"__metadata__": {"a": 1}}), "__metadata__ is not"),
]


@pytest.mark.parametrize(("content", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message) as caught:
        SafetensorsFolder.open(path)
    assert "bad.safetensors" in str(caught.value)


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    whole = write_small(tmp_path / "whole.safetensors")
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            SafetensorsFolder.open(path)


def test_fuzz(tmp_path: Path) -> None:
    """10,000 damaged files: each is refused with FormatError or opens with every tensor inside the file."""
    path = tmp_path / "fuzz.safetensors"
    whole = write_small(tmp_path / "whole.safetensors")
    rng = random.Random(5)
    interesting = b'{}[],:"0123456789-eEtfn\\ \xff\x00'
    opened = 0
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            kind = rng.randrange(5)
            if kind == 0:
                data[at] = rng.choice(interesting)
            elif kind == 1:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 2:
                del data[at : at + rng.randint(1, 9)]
            elif kind == 3:
                data[at:at] = rng.choice([b"0", b"9" * 30, b'"f32":', b"[[", b"}}", b"-1"])
            else:
                data[0:8] = struct.pack("<Q", rng.choice([0, 1, 8, len(whole), 1 << 32, (1 << 64) - 1]))
        path.write_bytes(bytes(data) or b"x")
        try:
            folder = SafetensorsFolder.open(path)
        except FormatError as error:
            assert "fuzz.safetensors" in str(error)
            continue
        opened += 1
        for name, info in folder.tensors.items():
            assert folder.tensor(name).dtype == DTYPES[info.dtype]
    assert 0 < opened < 10_000
