"""Choosing, on a fake CPU, the operators that the target device would choose.

[Note: Target operators]
A trace runs on fake CPU tensors, because a fake CUDA leaf aborts a CPU build of torch.
`scaled_dot_product_attention` would therefore pick the CPU kernel. For a CUDA target it
is routed here to the aten operator that `sdp_utils.cpp` of torch would pick: flash for
half precision, no mask and a head of at most 256; memory-efficient for the rest that it
supports; the math path otherwise. Their fake kernels give the true shapes of what is
saved for backward.

CUDA autocast runs reductions and norms in fp32 where CPU autocast does not; the
functions of `_CUDA_FP32` are cast here as `autocast_mode.h` lists them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Target = Literal["cuda", "cpu"]

_HALF = (torch.float16, torch.bfloat16)
_CUDA_FP32 = frozenset(
    {
        functional.layer_norm,
        functional.group_norm,
        functional.softmax,
        functional.log_softmax,
        functional.cross_entropy,
        functional.nll_loss,
        functional.mse_loss,
        torch.softmax,
        torch.log_softmax,
        torch.exp,
        torch.log,
        torch.pow,
        torch.rsqrt,
        torch.norm,
        torch.cumsum,
        torch.Tensor.softmax,
        torch.Tensor.exp,
        torch.Tensor.log,
        torch.Tensor.pow,
        torch.Tensor.rsqrt,
        torch.Tensor.cumsum,
    }
)


class TargetOperators(TorchFunctionMode):
    """Makes the choices of a CUDA device; see [Note: Target operators]."""

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self._autocast = autocast

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if self._autocast and func in _CUDA_FP32:
            args = tuple(map(_to_fp32, args))
        return func(*args, **kwargs)


def _to_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _HALF:
        return value.float()
    return value


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    head = query.shape[-1]
    aligned = head % 8 == 0
    if query.dtype in _HALF and attn_mask is None and head <= 256 and aligned:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if enable_gqa and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    if query.dim() == 4 and query.dtype != torch.float64 and head % 4 == 0:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                attn_mask.logical_not(), float("-inf")
            )
        if attn_mask is not None:
            shape = (*query.shape[:3], key.shape[2])
            attn_mask = attn_mask.expand(shape)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )[0]
