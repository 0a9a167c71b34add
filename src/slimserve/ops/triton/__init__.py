"""Triton kernels. Their compiled forms lie in the cache folder, wherever they are imported from."""

from slimserve.ops.compiled import keep_kernels

keep_kernels()
