"""A pretend CUDA device: tensors that say "cuda:0" and compute on the CPU (`pretend_process`).

Real values, real control flow, autograd's hooks in a thread of the device, autocast as on CUDA. It
refuses what a GPU refuses: CPU tensors beside its own, `numpy()`. It leaves undefined what a GPU
leaves undefined: a copy that has not arrived yet. And it counts what costs time there: launches,
waits of the host, copied bytes, matrix products by dtype, memory.

It does not see real kernels, streams other than the first, or NCCL. Attention arrives decomposed,
so launches and memory are upper bounds.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
# What makes the host wait: the result, or its size, is a number that Python needs.
WAITS = {
    *(aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.allclose),
    aten.repeat_interleave,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# Kernels that add in no fixed order, unless torch is told to be deterministic.
ATOMIC = {
    aten.index_add,
    aten.index_add_,
    aten.scatter_add,
    aten.scatter_add_,
    *INDEXING - {aten.index},
}
# Without a kernel: views, and memory that nobody has written yet.
FREE = {
    *("detach", "view", "alias", "t", "transpose", "expand", "slice", "select", "unsqueeze"),
    *("squeeze", "permute", "split", "split_with_sizes", "as_strided", "_unsafe_view", "unbind"),
    *("diagonal", "lift_fresh", "unfold", "_reshape_alias", "is_pinned", "empty", "new_empty"),
    *("empty_like", "empty_strided", "new_empty_strided", "_local_scalar_dense", "set_"),
}
WRITES_OUT = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm}  # in another dtype, if asked for


class DeviceError(RuntimeError):
    """What a GPU would refuse."""


@dataclass
class Seen:
    """What the device was asked to do, by the line of the project that asked."""

    launches: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)  # bytes, host to device
    fetched: Counter[str] = field(default_factory=Counter)  # bytes, device to host
    atomic: Counter[str] = field(default_factory=Counter)
    flops: Counter[torch.dtype] = field(default_factory=Counter)
    memory: int = 0
    peak: int = 0


seen = Seen()
# Copies that are under way: what to do when the host waits for the device.
_under_way: list[Any] = []
_alive: set[int] = set()


def forget() -> None:
    _under_way.clear()
    _under_way.clear()
    memory = seen.memory
    seen.__init__(memory=memory, peak=memory)  # type: ignore[misc]


def arrive() -> None:
    """The host waits until all copies are done."""
    while _under_way:
        _under_way.pop()()


class DeviceTensor(Tensor):
    """`inner`, which lies in the CPU's memory, as a tensor of the device."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "DeviceTensor":
        assert type(inner) is not DeviceTensor
        found = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
        )
        found.inner = inner
        _count_memory(inner.untyped_storage())
        return found

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self) -> str:
        return f"DeviceTensor({self.inner!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # `Module.to` looks for these two
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "DeviceTensor":
        return DeviceTensor(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def _count_memory(storage: torch.UntypedStorage) -> None:
    key, size = storage._cdata, storage.nbytes()
    if key in _alive:
        return

    def gone() -> None:
        _alive.discard(key)
        seen.memory -= size

    _alive.add(key)
    seen.memory += size
    seen.peak = max(seen.peak, seen.memory)
    weakref.finalize(storage, gone)


class Device(TorchDispatchMode):
    """Sees also what makes a tensor out of none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _composite(func):  # in inference mode these arrive whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return dispatch(func, args, kwargs or {})


@cache
def _composite(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def line() -> str:
    """The project's line that is running; else the first outside torch."""
    frame, library = sys._getframe(2), "autograd"
    while frame is not None:
        name = frame.f_code.co_filename
        if "dpfp_ray/" in name:
            return f"{name.rpartition('dpfp_ray/')[2]}:{frame.f_lineno}"
        if library == "autograd" and "site-packages/" in name and "/torch/" not in name:
            library = f"{name.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return library


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    own = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    device = kwargs.get("device")
    to_cuda = device is not None and torch.device(device).type == "cuda"
    if not own and not to_cuda:
        return func(*args, **kwargs)
    packet = func.overloadpacket
    name = packet.__name__
    if packet is aten._to_copy or packet is aten.copy_:
        found = _copy(func, args, kwargs)
        if found is not None:
            return found
    elif packet in INDEXING:
        _check_index(args)
    elif own and any(
        t.ndim and not isinstance(t, DeviceTensor) and t.device.type == "cpu" for t in tensors
    ):
        raise DeviceError(f"{func}: CPU tensors beside the device's at {line()}")
    if packet in WAITS:
        seen.waits[f"{name} at {line()}"] += 1
        arrive()
    if name not in FREE:
        seen.launches += 1
    if packet in ATOMIC and not torch.are_deterministic_algorithms_enabled():
        seen.atomic[f"{name} at {line()}"] += 1

    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
    if inner_kwargs.get("device") is not None:
        inner_kwargs["device"] = torch.device("cpu")
    if "pin_memory" in inner_kwargs:
        inner_kwargs["pin_memory"] = False
    if packet in WRITES_OUT and func._overloadname == "dtype":
        # What tensor cores do: exact products of halves, added up in fp32.
        *factors, dtype = (a.to(inner_args[-1]) if isinstance(a, Tensor) else a for a in inner_args)
        found = packet(*factors, **inner_kwargs).to(dtype)
    else:
        found = func(*inner_args, **inner_kwargs)
    found = tree_map(_wrapped, found)
    outputs = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
    _count_flops(packet, args, own, outputs)
    return return_and_correct_aliasing(func, args, kwargs, found) if outputs else found


def _count_flops(packet: Any, args: Any, own: list[DeviceTensor], outputs: list[Tensor]) -> None:
    factors = [tensor for tensor in own if tensor.ndim]
    if packet in flop_registry and outputs:
        count = flop_registry[packet](*own, out_val=outputs[0])
    elif packet in (aten.addmv_, aten.addmv, aten.mv):
        count = 2 * max(tensor.numel() for tensor in factors)
    elif packet is aten.addmm_:
        count = 2 * args[1].numel() * args[2].shape[-1]
    else:
        return
    seen.flops[factors[-1].dtype] += count


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value


def _wrapped(value: Any) -> Any:
    plain = isinstance(value, Tensor) and not isinstance(value, DeviceTensor)
    return DeviceTensor(value) if plain else value


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Between the two memories; None for all else."""
    if func.overloadpacket is aten.copy_:
        target, source = args[:2]
        wait = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if isinstance(target, DeviceTensor) == isinstance(source, DeviceTensor):
            return None
        if isinstance(target, DeviceTensor):
            seen.sent[line()] += _bytes(source)
            return None if source.ndim == 0 else _put(target, source)
        return _fetch(target, source.inner, wait)
    source, device = args[0], kwargs.get("device")
    goes = source.device if device is None else torch.device(device)
    wait = not kwargs.get("non_blocking")
    if isinstance(source, DeviceTensor) and goes.type == "cpu":
        kept = source.inner.to(kwargs.get("dtype") or source.dtype, copy=True)
        return _fetch(torch.empty_like(kept), kept, wait)
    if isinstance(source, DeviceTensor) or goes.type != "cuda":
        return None
    seen.sent[line()] += _bytes(source)
    if not wait and hasattr(source, "pinned"):
        _under_way.append(partial(_check_sent, source, source.clone(), line()))
    return DeviceTensor(source.to(kwargs.get("dtype") or source.dtype, copy=True))


def _put(target: DeviceTensor, source: Tensor) -> DeviceTensor:
    target.inner.copy_(source)
    seen.launches += 1
    return target


def _fetch(target: Tensor, source: Tensor, wait: bool) -> Tensor:
    seen.fetched[line()] += _bytes(source)
    seen.launches += 1
    if wait:
        seen.waits[f"copy to the CPU at {line()}"] += 1
        arrive()
        return target.copy_(source)
    kept = source.clone()
    _under_way.append(lambda: target.copy_(kept))
    return target.fill_(float("nan") if target.is_floating_point() else 1)  # whatever was there


def _check_sent(source: Tensor, sent: Tensor, where: str) -> None:
    if not torch.equal(source, sent):
        raise DeviceError(f"pinned memory was written to before it was copied at {where}")


def _check_index(args: Any) -> None:
    indices = [index for index in args[1] or [] if isinstance(index, Tensor)]
    if not isinstance(args[0], DeviceTensor):
        raise DeviceError(f"a CPU tensor indexed by the device's at {line()}")
    values = args[2] if len(args) > 2 else None
    if isinstance(values, Tensor) and values.ndim and not isinstance(values, DeviceTensor):
        raise DeviceError(f"CPU values put among the device's at {line()}")
    for index in indices:
        if not isinstance(index, DeviceTensor):  # allowed: torch copies it over, and waits
            seen.sent[line()] += _bytes(index)
            seen.waits[f"index from the CPU at {line()}"] += 1
        fills = values is not None and values.numel() == 1 and len(indices) == 1
        if index.dtype == torch.bool and not fills:
            seen.waits[f"mask at {line()}"] += 1
            arrive()


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    if isinstance(tensor, DeviceTensor):
        raise DeviceError(f"only the CPU's memory can be pinned, at {line()}")
    pinned = tensor.clone()
    pinned.pinned = True  # type: ignore[attr-defined]
    return pinned


def _synchronize(device: Any = None) -> None:
    seen.waits[f"synchronize at {line()}"] += 1
    arrive()


@cache
def install() -> None:
    """For the rest of this process, torch says that there is one card, of 80 GB, with bf16."""
    import torch.amp.autocast_mode
    import torch.cuda.amp.common

    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "synchronize": _synchronize,
        "mem_get_info": lambda *_: (80 * 2**30 - seen.memory, 80 * 2**30),
        "memory_allocated": lambda *_: seen.memory,
        "max_memory_allocated": lambda *_: seen.peak,
        "reset_peak_memory_stats": lambda *_: setattr(seen, "peak", seen.memory),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for module in (torch.amp.autocast_mode, torch.cuda.amp.common):
        module.amp_definitely_not_available = lambda: False  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[assignment, method-assign]
    torch.manual_seed = torch.default_generator.manual_seed  # torch's own asks the driver, too


@contextmanager
def pretend_cuda() -> Iterator[Seen]:
    """In here "cuda" is a device; `seen` starts at nothing."""
    install()  # not on import, which a test's own process does to read an error
    forget()
    with Device():
        yield seen
        arrive()
