"""Records: the schema refuses what it does not know, the catalog resolves everywhere, settings are used or refused."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from slimserve import fetch
from slimserve.errors import RefusalError, SlimServeError, UsageError
from slimserve.hardware import Accelerator, DeviceKind, Hardware
from slimserve.plan.description import describe_file
from slimserve.plan.memory import plan_json
from slimserve.profiles import evidence as evidence_module
from slimserve.profiles.evidence import Status
from slimserve.profiles.planning import plan_profile
from slimserve.profiles.record import parse_record
from slimserve.profiles.registry import CATALOG_FOLDER, find_record, load_catalog
from slimserve.profiles.report import Verdict, list_lines, list_rows, show_json, show_lines
from slimserve.profiles.resolve import Origin, describe_record, resolve, resolve_record
from slimserve.profiles.settings import SETTINGS, SettingKind, check

GIB = 1 << 30
LAPTOP = Hardware("a processor", 4, frozenset({"avx2"}), 16 * GIB, 12 * GIB)
H200 = Hardware(
    "a processor", 16, frozenset(), 128 * GIB, 120 * GIB,
    (Accelerator(0, DeviceKind.CUDA, "NVIDIA H200", 140 * GIB, 139 * GIB, "sm_90"),),
)  # fmt: skip
CATALOG = load_catalog()
NAMES = sorted(CATALOG.records)


def minimal() -> dict[str, Any]:
    return tomllib.loads((CATALOG_FOLDER / "smollm2-135m.toml").read_text(encoding="utf-8"))


def parse(values: dict[str, Any]) -> Any:
    return parse_record(values, Path("smollm2-135m.toml"))


# --- the schema ---


def test_the_catalog_has_no_problems() -> None:
    assert CATALOG.problems == ()
    wanted = {"qwen25-coder-0.5b", "qwen25-coder-1.5b", "smollm2-135m", "gemma3-270m", "nano-glm5-next", "nano-qwen3_5"}
    assert wanted <= set(NAMES)
    for family in ("glm53f-", "qwen38-", "qwen38fn-", "qwen35-4b", "glm52-", "dsv4-", "muse-", "k3-"):
        assert any(name.startswith(family) for name in NAMES), family


@pytest.mark.parametrize(
    ("path", "key", "suggestion"),
    [
        ((), "sumary", "summary"),
        (("model",), "architectur", "architecture"),
        (("model", "files", 0), "sha265", "sha256"),
        (("model", "files", 0, "places", 0), "repo", "valid"),
        (("engine",), "max_sequence", "max_sequences"),
        (("platform", 0), "figure", "figures"),
        (("platform", 0, "machine"), "memry", "memory"),
        (("platform", 0, "engine"), "kv_dtyp", "kv_dtype"),
        (("sampling",), "temprature", "temperature"),
        (("serving",), "served_nam", "served_name"),
        (("model", "formats", 0), "mach", "match"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(path: tuple[Any, ...], key: str, suggestion: str) -> None:
    values = minimal()
    table: Any = values
    for step in path:
        table = table[step]
    table[key] = 1
    with pytest.raises(UsageError) as caught:
        parse(values)
    assert repr(key) in str(caught.value) and suggestion in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("name",), "other", "must agree"),
        (("summary",), 3, "expected text"),
        (("model", "max_context"), 1, "expected 64"),
        (("model", "chat"), "yes", "true or false"),
        (("model", "files", 0, "sha256"), "abc", "64 lower-case hex"),
        (("model", "files", 0, "bytes"), -1, "expected 1"),
        (("model", "files", 0, "name"), "../up.gguf", "plain name"),
        (("model", "files", 0, "places", 0, "kind"), "ftp", "valid"),
        (("engine", "max_sequences"), 0, "1 to 4096"),
        (("engine", "snapshot_spacing"), 100, "multiple of 64"),
        (("engine", "prefix_caching"), 1, "true or false"),
        (("engine", "cache_bytes"), "12 bananas", "not a size"),
        (("engine", "draft_schedule"), [[2, 4, 1]], "must start at 1"),
        (("engine", "draft_schedule"), [[1, 4]], "[from, to, drafts]"),
        (("platform", 0, "stage"), "supported", "valid"),
        (("platform", 0, "machine", "kind"), "quantum", "valid"),
        (("platform", 0, "figures"), [{"what": "x", "values": []}], "is empty"),
        (("platform", 0, "figures"), [{"what": "x", "values": [1.0], "concurrency": [1, 2]}], "1 entries for 2"),
        (("sampling", "top_p"), 2.0, "expected 0 to 1"),
        (("platform",), [], "no [[platform]]"),
        (("model", "formats"), [], "formats"),
    ],
)
def test_wrong_values_are_one_clear_sentence(path: tuple[Any, ...], value: Any, words: str) -> None:
    values = minimal()
    table: Any = values
    for step in path[:-1]:
        table = table[step]
    table[path[-1]] = value
    with pytest.raises(SlimServeError) as caught:
        parse(values)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["q8_0", "turboquant", "int4", "float32", "auto"])
def test_kv_dtypes_beyond_the_policy_are_refused_with_it(dtype: str) -> None:
    values = minimal()
    values["engine"]["kv_dtype"] = dtype
    with pytest.raises(RefusalError, match="TurboQuant included, is prohibited"):
        parse(values)
    if dtype != "float32":
        with pytest.raises(RefusalError, match="prohibited"):
            resolve("smollm2-135m", flags={"kv_dtype": dtype}, hardware=LAPTOP)


def test_two_platforms_of_one_name_are_refused() -> None:
    values = minimal()
    values["platform"].append(copy.deepcopy(values["platform"][0]))
    with pytest.raises(UsageError, match="share a name"):
        parse(values)


def test_bad_toml_and_absent_profiles_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.toml").write_text("name = \n", encoding="utf-8")
    monkeypatch.setenv("SLIMSERVE_PROFILES", str(tmp_path))
    with pytest.raises(UsageError, match=r"broken.toml is not valid TOML"):
        find_record("broken")
    catalog = load_catalog()
    assert len(catalog.problems) == 1 and set(NAMES) <= set(catalog.records)
    with pytest.raises(UsageError, match="did you mean smollm2-135m"):
        find_record("smollm-135m")


def test_a_users_record_takes_the_place_of_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (CATALOG_FOLDER / "smollm2-135m.toml").read_text(encoding="utf-8")
    (tmp_path / "smollm2-135m.toml").write_text(text.replace("The smallest", "My own smallest"), encoding="utf-8")
    monkeypatch.setenv("SLIMSERVE_PROFILES", str(tmp_path))
    assert find_record("smollm2-135m").summary.startswith("My own")


# --- the catalog ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hardware", [LAPTOP, H200], ids=["laptop", "h200"])
def test_every_record_resolves_plans_and_shows(name: str, hardware: Hardware) -> None:
    record = CATALOG.records[name]
    for platform in (None, *(entry.name for entry in record.platforms)):
        profile = resolve_record(record, hardware=hardware, platform=platform)
        data = show_json(profile)
        json.dumps(data)
        assert all("\n" not in line for line in show_lines(profile))
        assert set(profile.settings) == set(SETTINGS)
        assert data["status"] != "supported" or evidence_module.load_evidence(name)
        try:
            plan = plan_profile(profile)
        except RefusalError as error:
            assert "needs" in str(error)
            continue
        assert {"terms", "fits", "binding", "longest_context"} <= set(plan_json(plan))
        assert plan.fits or plan.shortfall_bytes > 0 or plan.caches_too_small


def test_the_list_has_a_line_per_profile_and_says_why() -> None:
    rows, problems = list_rows(LAPTOP)
    assert problems == () and [row.name for row in rows] != [] and {row.name for row in rows} == set(NAMES)
    by_name = {row.name: row for row in rows}
    assert by_name["smollm2-135m"].verdict is Verdict.FITS
    assert by_name["glm53f-q2-1"].verdict is Verdict.DOES_NOT_FIT and "H200" in by_name["glm53f-q2-1"].reason
    assert by_name["k3-xxs-8"].verdict is Verdict.NOT_IN_THIS_BUILD and "k3" in by_name["k3-xxs-8"].reason
    assert by_name["glm53f-nvfp4-4"].status is Status.REFERENCE
    assert len(list_lines(rows)) == len(rows) + 1
    json.dumps([row.as_json() for row in rows])


def test_a_platform_is_never_widened() -> None:
    small = Hardware(
        "p", 8, frozenset(), 64 * GIB, 60 * GIB,
        (Accelerator(0, DeviceKind.CUDA, "NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB),),
    )  # fmt: skip
    assert resolve("smollm2-135m", hardware=H200).platform_name == "h200"
    untuned = resolve("smollm2-135m", hardware=small)
    assert untuned.platform is None and "no tuned record" in untuned.status_reason
    assert resolve("smollm2-135m", hardware=small, device="cpu").platform_name == "cpu"
    assert resolve("glm53f-nvfp4-4", hardware=H200).platform is None


@pytest.mark.parametrize("name", ["qwen25-coder-0.5b", "qwen25-coder-1.5b", "smollm2-135m", "gemma3-270m"])
def test_the_catalog_says_of_a_file_what_its_header_says(name: str) -> None:
    record = CATALOG.records[name]
    path = fetch.model_path(record.model.files[0].name)
    if not path.exists():
        pytest.skip(f"{path.name} is not in the model cache; slimserve fetch {name} brings it")
    catalog, header = describe_record(record), describe_file(path)
    sizes = {weight.name: (weight.format, weight.num_bytes) for weight in header.weights}
    assert {weight.name: (weight.format, weight.num_bytes) for weight in catalog.weights} == sizes
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        assert list(catalog.caches(dtype)) == list(header.caches(dtype))
    assert catalog.max_context == header.max_context == record.model.max_context


def test_recorded_sizes_of_large_files_come_out_of_the_tables() -> None:
    """The published files hold a little more: vision tower or padding, and metadata."""
    weights = {name: describe_record(CATALOG.records[name]).weight_bytes for name in ("glm53f-q2-1", "qwen38-nvfp4-1")}
    assert 0.98 < weights["glm53f-q2-1"] / 96_505_816_384 <= 1.005
    assert 0.93 < weights["qwen38-nvfp4-1"] / 23_420_000_000 <= 1.0


# --- resolution ---


def test_every_value_has_an_origin_and_overrides_invalidate() -> None:
    plain = resolve("qwen25-coder-0.5b", hardware=LAPTOP)
    assert resolve("nano-qwen3_5", hardware=LAPTOP).settings["kv_dtype"].origin is Origin.RECORD
    assert (plain.settings["kv_dtype"].value, plain.settings["kv_dtype"].origin) == ("fp16", Origin.PLATFORM)
    assert plain.settings["max_sequences"].origin is Origin.PLATFORM and plain.settings["max_sequences"].why
    assert plain.settings["token_budget"].origin is Origin.DEFAULT
    assert plain.settings["max_context"].origin is Origin.MODEL
    assert plain.invalidated == ()
    changed = resolve("qwen25-coder-0.5b", hardware=LAPTOP, flags={"max_context": 4096, "max_sequences": 8})
    assert changed.settings["max_context"].origin is Origin.FLAG
    assert changed.invalidated == ("max_context",)
    assert re.search("no longer the (recorded|qualified) configuration", changed.status_reason)
    assert changed.config_hash != plain.config_hash


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_contxt": 4096}, "did you mean max_context"),
        ({"max_context": 65536}, "beyond the model's 32768"),
        ({"max_sequences": 0}, "1 to 4096"),
        ({"token_budget": "many"}, "whole number"),
    ],
)
def test_bad_flags(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve("qwen25-coder-0.5b", hardware=LAPTOP, flags=flags)


def test_bad_devices_and_platforms() -> None:
    with pytest.raises(UsageError, match="did you mean cuda"):
        resolve("smollm2-135m", hardware=LAPTOP, device="cudda")
    with pytest.raises(UsageError, match="has no platform 'h20'"):
        resolve("smollm2-135m", hardware=LAPTOP, platform="h20")
    with pytest.raises(UsageError, match="--model"):
        resolve(hardware=LAPTOP)


OTHER: dict[str, Any] = {
    "max_context": 2048,
    "max_sequences": 3,
    "kv_dtype": "fp8",
    "state_dtype": "bf16",
    "snapshot_spacing": 2048,
    "cache_bytes": "1GiB",
    "prefix_caching": False,
    "token_budget": 96,
    "mixed_prefill_budget": 48,
    "max_queue": 7,
    "skip_ahead": 3,
    "ageing_steps": 11,
    "activation_dtype": "bf16",
    "cpu_activations": "float",
    "numerics": "fast",
    "num_threads": 2,
    "drafter": "lookup",
    "draft_schedule": [[1, 4, 2]],
    "tensor_parallel": 2,
    "data_parallel": 2,
    "expert_parallel": True,
    "host_tier_bytes": "1GiB",
    "disk_tier_bytes": "1GiB",
    "expert_arena_bytes": "1GiB",
}


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_each_setting_is_used_or_refused(name: str) -> None:
    """Changing any setting changes the engine's configuration, or is refused by name; nothing is ignored."""
    before = resolve("qwen25-coder-0.5b", hardware=LAPTOP)
    after = resolve("qwen25-coder-0.5b", hardware=LAPTOP, flags={name: OTHER[name]})
    assert after.value(name) == check(name, OTHER[name], "test")
    assert after.config_hash != before.config_hash
    try:
        used = after.engine_config() != before.engine_config()
    except RefusalError as error:
        assert name in str(error)
    else:
        assert used, f"{name} changes nothing"


def test_the_whole_configuration_crosses_to_the_engines_process() -> None:
    """Every field that a setting can change survives the message; none is dropped on the way."""
    import msgspec

    from slimserve.engine.build import decode_config, encode_config

    used = {name: value for name, value in OTHER.items() if name not in ("state_dtype", "numerics", "expert_parallel")}
    used = {
        name: value for name, value in used.items() if not name.endswith(("_parallel", "tier_bytes", "arena_bytes"))
    }
    config = resolve("qwen25-coder-0.5b", hardware=LAPTOP, flags=used).engine_config()
    assert config.speculation.schedule == ((1, 4, 2),)
    assert decode_config(msgspec.json.decode(msgspec.json.encode(encode_config(config)))) == config


def test_every_setting_kind_is_described() -> None:
    assert set(OTHER) == set(SETTINGS)
    assert {spec.kind for spec in SETTINGS.values()} == set(SettingKind)
    assert all(spec.meaning for spec in SETTINGS.values())


def test_float32_caches_are_for_parity_runs_by_flag_only() -> None:
    profile = resolve("smollm2-135m", hardware=LAPTOP, flags={"kv_dtype": "float32"})
    assert profile.engine_config().cache.dtype.torch is torch.float32


def test_an_ad_hoc_profile_comes_from_the_files_own_metadata() -> None:
    record = CATALOG.records["gemma3-270m"]
    path = fetch.model_path(record.model.files[0].name)
    if not path.exists():
        pytest.skip(f"{path.name} is not in the model cache; slimserve fetch gemma3-270m brings it")
    profile = resolve(model=path, hardware=LAPTOP)
    assert profile.name == path.stem and not profile.chat and profile.description.source == "file header"
    assert profile.model_path() == path
    assert profile.engine_config().scheduler.max_context == 32768
    with pytest.raises(UsageError, match="does not exist"):
        resolve(model="/no/such/file.gguf", hardware=LAPTOP)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all scalars of a parsed document."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for index, inner in enumerate(value) for leaf in leaves(inner, (*path, index))]
    return [path]


def changed(value: Any) -> list[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 64, max(value - 1, 0)]
    if isinstance(value, float):
        return [value * 0.5 + 0.01]
    return [f"{value}x", "BF16" if value != "BF16" else "F32"]


# What a record says to a transfer, a qualification or a kernel's choice, and not to `show`.
ELSEWHERE = ("places", "notices", "qualify", "scales")


@pytest.mark.parametrize("name", ["gemma3-270m", "qwen38-nvfp4-1", "glm53f-q2-1", "qwen38fn-offload-2"])
def test_every_field_of_a_record_is_used_or_refused(name: str) -> None:
    """Changing any value of a record changes what is shown, planned or run, or is refused by name."""
    document = tomllib.loads((CATALOG_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    path = Path(f"{name}.toml")

    def seen(values: dict[str, Any]) -> str:
        record = parse_record(values, path)
        shown = [show_json(resolve_record(record, hardware=LAPTOP, platform=p.name)) for p in record.platforms]
        return json.dumps([shown, describe_record(record).weight_bytes, [str(s) for s in record.model.files]])

    before = seen(document)
    idle = []
    for leaf in leaves(document):
        if any(step in ELSEWHERE for step in leaf) or leaf[:2] == ("model", "config"):
            continue
        for value in changed(_at(document, leaf)):
            other = copy.deepcopy(document)
            _at(other, leaf[:-1])[leaf[-1]] = value
            try:
                if seen(other) != before:
                    break
            except SlimServeError:
                break
        else:
            idle.append(leaf)
    assert idle == []


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


def test_every_field_of_a_qualification_is_asked_for() -> None:
    import inspect
    from dataclasses import fields

    from slimserve.profiles.record import QualifyRecord

    root = Path(evidence_module.__file__).parent.parent / "measure"
    rooms = (*root.glob("gates*.py"), root / "qualify.py", root / "questions.py")
    code = "".join(path.read_text(encoding="utf-8") for path in rooms)
    code += inspect.getsource(QualifyRecord.gates.fget)
    assert [field.name for field in fields(QualifyRecord) if f".{field.name}" not in code] == []


# --- evidence ---


def write_evidence(folder: Path, profile: Any, **changes: Any) -> None:
    body = {
        "profile": profile.name,
        "platform": profile.platform.name,
        "settings_hash": profile.config_hash,
        "gates": [{"name": name, "passed": True} for name in profile.record.qualify.gates],
        **changes,
    }
    (folder / profile.name).mkdir(exist_ok=True)
    (folder / profile.name / "run.json").write_text(json.dumps(body), encoding="utf-8")


def test_supported_is_computed_from_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "EVIDENCE_FOLDER", tmp_path)
    profile = resolve("smollm2-135m", hardware=LAPTOP)
    assert profile.status is Status.IN_PROGRESS

    def status(**changes: Any) -> tuple[Status, str]:
        write_evidence(tmp_path, profile, **changes)
        now = resolve("smollm2-135m", hardware=LAPTOP)
        return now.status, now.status_reason

    assert status()[0] is Status.SUPPORTED
    changed = resolve("smollm2-135m", hardware=LAPTOP, flags={"max_sequences": 2})
    assert changed.status is Status.IN_PROGRESS
    assert changed.status_reason == "changed by max_sequences: no longer the qualified configuration"
    assert resolve("smollm2-135m", hardware=H200).status is Status.IN_PROGRESS
    assert status(settings_hash="0" * 16) == (
        Status.IN_PROGRESS,
        "qualified with other settings; run slimserve qualify again",
    )
    assert "failed at needle" in status(gates=[{"name": "needle", "passed": False}])[1]
    assert status(gates=[])[0] is Status.IN_PROGRESS
    assert status(gates=[{"name": "canary", "passed": "yes"}])[0] is Status.IN_PROGRESS
    (tmp_path / "smollm2-135m" / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="is no evidence file"):
        resolve("smollm2-135m", hardware=LAPTOP)
