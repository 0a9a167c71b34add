"""Sampling: which token follows, decided on the device where the logits are."""

from slimserve.engine.sample.batch import SamplingBatch, SamplingRow, build_batch
from slimserve.engine.sample.counts import TokenCounts
from slimserve.engine.sample.host import LOGPROB_FLOOR
from slimserve.engine.sample.sampler import SampleOutput, sample, score
from slimserve.ops.reference.random import Purpose

__all__ = [
    "LOGPROB_FLOOR",
    "Purpose",
    "SampleOutput",
    "SamplingBatch",
    "SamplingRow",
    "TokenCounts",
    "build_batch",
    "sample",
    "score",
]
