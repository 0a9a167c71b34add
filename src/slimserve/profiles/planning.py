"""The memory plan and the floor of a resolved profile, on this machine or on the one its record names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slimserve.engine.config import CacheDtype, EngineConfig
from slimserve.errors import RefusalError
from slimserve.hardware import DeviceKind, Hardware
from slimserve.plan.floor import StepFloor, floor_table
from slimserve.plan.memory import DeviceMemory, MemoryPlan, plan_memory
from slimserve.profiles.evidence import Status
from slimserve.profiles.record import Machine
from slimserve.profiles.resolve import Origin, ResolvedProfile, Setting


def machine_memory(hardware: Hardware, kind: DeviceKind, count: int, first: int = 0) -> DeviceMemory | None:
    """The memory of `count` devices, from number `first`, that would share a model; None where there are fewer."""
    if kind is DeviceKind.CPU:
        return DeviceMemory("cpu", hardware.memory_total, hardware.memory_free, 1, hardware.cpu_model)
    devices = hardware.of_kind(kind)[first : first + count]
    if len(devices) < count:
        return None
    total = min(device.total_bytes for device in devices)
    free = min(device.free_bytes for device in devices)
    return DeviceMemory("cuda", total, free, count, devices[0].name)


def recorded_memory(machine: Machine, count: int) -> DeviceMemory | None:
    """The memory of the machine that a platform record names, all of it free; None where it does not say."""
    if not machine.memory_bytes:
        return None
    kind = "cpu" if machine.kind is DeviceKind.CPU else "cuda"
    return DeviceMemory(kind, machine.memory_bytes, machine.memory_bytes, count, machine.describe())


def memory_for(profile: ResolvedProfile) -> DeviceMemory | None:
    """Where the profile would run: this machine's devices, else (a platform chosen by name) the record's."""
    here = machine_memory(profile.hardware, profile.device, profile.num_devices, profile.device_index)
    if here is None and profile.platform is not None:
        return recorded_memory(profile.platform.machine, profile.num_devices)
    return here


def plan_profile(profile: ResolvedProfile, memory: DeviceMemory | None = None, *, made: bool = False) -> MemoryPlan:
    """The plan of a profile, `made`: with synthetic weights; RefusalError where there is no such device to plan for."""
    target = memory or memory_for(profile)
    if target is None:
        raise RefusalError(
            f"{profile.name} needs {profile.num_devices} x {profile.device.value} and this machine has "
            f"{len(profile.hardware.of_kind(profile.device))}; give --gpu-memory and --gpus to plan for another"
        )
    return plan_memory(
        profile.description,
        profile.planned_config(),
        target,
        max_draft=profile.max_draft,
        drafter=profile.value("drafter") == "nextn",
        companion=profile.draft_model,
        made=made,
    )


def fitted(profile: ResolvedProfile, memory: DeviceMemory | None = None, *, made: bool = False) -> ResolvedProfile:
    """The profile with sequences and context lowered as far as this memory asks.

    Only values that nobody chose (origin default or model) are lowered; a record's and a flag's stand and may be
    refused. Unchanged where it fits or where lowering them does not help.
    """
    free = {Origin.DEFAULT, Origin.MODEL}
    sequences, context = profile.settings["max_sequences"], profile.settings["max_context"]
    if sequences.origin not in free and context.origin not in free:
        return profile
    try:
        plan = plan_profile(profile, memory, made=made)
    except RefusalError:
        return profile
    if plan.fits:
        return profile
    if sequences.origin in free and context.origin in free and plan.smaller is not None:
        return _lowered(profile, *plan.smaller)
    if sequences.origin in free and plan.most_sequences:
        return _lowered(profile, plan.most_sequences, plan.max_context)
    if context.origin in free and plan.longest_context:
        return _lowered(profile, plan.max_sequences, plan.longest_context)
    return profile


def _lowered(profile: ResolvedProfile, max_sequences: int, max_context: int) -> ResolvedProfile:
    settings = dict(profile.settings)
    for name, value in (("max_sequences", max_sequences), ("max_context", max_context)):
        before = settings[name]
        if isinstance(before.value, int) and value < before.value:
            settings[name] = Setting(name, value, Origin.MACHINE, recorded=before.value)
    if profile.status is Status.SUPPORTED:
        reason = "lowered to fit this machine: no longer the qualified configuration"
        return replace(profile, settings=settings, status=Status.IN_PROGRESS, status_reason=reason)
    return replace(profile, settings=settings)


def admit(profile: ResolvedProfile, *, made: bool = False) -> tuple[EngineConfig, MemoryPlan]:
    """The engine's configuration with the cache budgets that the plan decided, and the plan.

    made: the weights will be synthetic. Raises RefusalError (exit code 3) with the numbers where it does not fit or
    this build cannot run it.
    """
    profile = fitted(profile, made=made)
    config = profile.engine_config()
    plan = plan_profile(profile, made=made)
    if plan.cache is None:
        raise plan.refusal(profile.name)
    cache = replace(config.cache, budget_bytes=plan.cache.budget_bytes)
    own = None if plan.drafter_cache is None else plan.drafter_cache.budget_bytes
    return replace(config, cache=cache, speculation=replace(config.speculation, cache_bytes=own)), plan


def floors(
    profile: ResolvedProfile, concurrencies: Sequence[int], *, context: int, bandwidth: float
) -> tuple[StepFloor, ...]:
    """The physical floor of a profile's decode step."""
    dtype = CacheDtype(profile.value("kv_dtype")).torch
    return floor_table(profile.description, concurrencies, context=context, bandwidth=bandwidth, kv_dtype=dtype)
