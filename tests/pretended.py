"""A GPU that is not there: its tensors name the device, and are computed on the CPU.

What CUDA refuses is refused: an operation on tensors of both devices, tensors of the CPU indexed by
those of the device, and numpy. So a test on a CPU finds what would end a run on a GPU.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, Self
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

THERE: Final = torch.device("cuda", 0)
_HERE: Final = torch.device("cpu")
_INDEXED: Final = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_COPIES: Final = frozenset({"copy_", "_to_copy"})


class _Tensor(torch.Tensor):
    """A tensor of the device; ``here`` has its values."""

    here: torch.Tensor

    def __new__(cls, here: torch.Tensor) -> Self:
        own: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=THERE,
        )
        own.here = here
        return own  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    devices = [one for one in leaves if isinstance(one, torch.device)]
    there = [one for one in tensors if isinstance(one, _Tensor)]
    name = func.overloadpacket.__name__
    if devices:
        goes = devices[0].type == THERE.type
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: _HERE, (args, kwargs))
    elif func.namespace == "kvtrie" or name in _COPIES:
        goes = isinstance(tensors[0], _Tensor)
    else:
        goes = bool(there)
        here = [one for one in tensors if not isinstance(one, _Tensor)]
        if name in _INDEXED:
            goes = isinstance(args[0], _Tensor)
            indices = {id(one) for one in args[1]} if goes else set()
            here = [one for one in here if id(one) not in indices]
        if there and any(one.dim() for one in here):
            msg = f"{func}: tensors on {THERE} and on {_HERE}"
            raise RuntimeError(msg)
    args, kwargs = pytree.tree_map_only(_Tensor, lambda one: one.here, (args, kwargs))
    found = func(*args, **kwargs)
    known = {id(one.here): one for one in there}

    def placed(one: torch.Tensor) -> torch.Tensor:
        if goes:
            return known[id(one)] if id(one) in known else _Tensor(one)
        return one.clone() if id(one) in known else one

    return pytree.tree_map_only(torch.Tensor, placed, found)


class _Dispatch(TorchDispatchMode):
    """Operations that make a tensor of the device from nothing, or from one of the CPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Under a mode with this key torch looks for no driver.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __torch_dispatch__(
        self,
        func: Any,
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Made(TorchFunctionMode):
    """``torch.tensor`` looks for the driver before any mode for operations runs."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and given.get("device") is not None:
            device = given.pop("device")
            return func(*args, **given).to(device)
        return func(*args, **given)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Within it, "cuda" is a device, for tensors and modules."""
    torch._C._ensureCUDADeviceGuardSet()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    cuda = (mock.patch(f"torch.cuda.{name}") for name in ("Event", "current_stream", "synchronize"))
    try:
        with contextlib.ExitStack() as stack:
            for one in cuda:
                stack.enter_context(one)
            # Tensors made in inference mode have no versions, which views of other tensors need.
            stack.enter_context(mock.patch("torch.inference_mode", torch.no_grad))
            stack.enter_context(_Made())
            stack.enter_context(_Dispatch())
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
