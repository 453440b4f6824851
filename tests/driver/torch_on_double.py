"""Tensors of the CPU that pass for those of a GPU of the driver's test double, a process per rank.

So ficco's functions run on any machine what they run on GPUs: calls that were made before, windows
in PyTorch's symmetric memory, captures, failures; below them the CUDA engine. `dress` makes the
process such a rank. Windows are files that all ranks map. Kernels are NumPy's, in stream order;
what plain torch does happens at once, so every call is waited for behind it, but in captures.

For processes that have the double as their driver.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from double_control import Cuda
from engine_node import LEAST
from launched_on_stream import LaunchedKernels
from numpy_on_stream import NumpyOnStream

from ficco.runtime import process_gpu

__all__ = ["Calls", "OnTensors", "Rank", "Shortly", "array_of", "dress"]

Tensor = torch.Tensor
_HERE = "cuda"
# As `empty_on_gpu`, with the same checks of its arguments.
_empty: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]


class Shortly:
    """Counts calls of which nothing but addresses was looked at."""

    def __enter__(self) -> Shortly:
        self.made = 0
        self._again = again = process_gpu.GpuProcessRuntime.run_prepared

        def counted(*args: Any) -> Any:
            made = again(*args)
            self.made += made is not None
            return made

        process_gpu.GpuProcessRuntime.run_prepared = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        process_gpu.GpuProcessRuntime.run_prepared = self._again  # type: ignore[method-assign]


class Calls(Protocol):
    """The calls of a driver that a rank makes by itself."""

    def new_stream(self) -> int: ...
    def register(self, address: int, size: int) -> None: ...
    def unregister(self, address: int) -> None: ...
    def synchronize(self, stream: int) -> None: ...
    def capturing(self, stream: int) -> bool: ...
    def begin_capture(self, stream: int) -> None: ...
    def end_capture(self, stream: int) -> Any:
        """Return an executable graph."""

    def launch(self, graph: Any, stream: int) -> None: ...
    def new_event(self) -> Any: ...
    def record(self, event: Any, stream: int) -> None: ...
    def ended(self, event: Any) -> bool: ...


class CudaCalls:
    """See `Calls`."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def new_stream(self) -> int:
        return int(self._cuda.stream())

    def register(self, address: int, size: int) -> None:
        self._cuda.cuMemHostRegister(address, size, 0)

    def unregister(self, address: int) -> None:
        self._cuda.cuMemHostUnregister(address)

    def synchronize(self, stream: int) -> None:
        self._cuda.cuStreamSynchronize(stream)

    def capturing(self, stream: int) -> bool:
        return int(self._cuda.cuStreamIsCapturing(stream)) != 0

    def begin_capture(self, stream: int) -> None:
        self._cuda.capture(stream, mode=2)  # the device learns of tensors meanwhile

    def end_capture(self, stream: int) -> Any:
        return self._cuda.cuGraphInstantiate(self._cuda.cuStreamEndCapture(stream), 0)

    def launch(self, graph: Any, stream: int) -> None:
        self._cuda.cuGraphLaunch(graph, stream)

    def new_event(self) -> Any:
        return self._cuda.cuEventCreate(2)

    def record(self, event: Any, stream: int) -> None:
        self._cuda.cuEventRecord(event, stream)

    def ended(self, event: Any) -> bool:
        return self._cuda.status("cuEventQuery", event) == 0


class _Kernels(LaunchedKernels):
    def place(self, b: Any) -> tuple[int, int, bool]:
        return super().place(array_of(b))


class OnTensors(NumpyOnStream):
    """NumPy on one stream; what it is given may be tensors, whose memory the device learns of.

    Args:
        device, stream: the rank's.
        driver: its calls.
    """

    name = "torch"

    def __init__(self, device: int, stream: int, driver: Calls) -> None:
        super().__init__({device: stream})
        self._calls, self._known, self._made = driver, dict[int, Any](), list[Any]()
        self._kept: dict[int, Any] = {}  # for ever
        self._thread: Any = SimpleNamespace(device=device, stream=stream)  # of every thread
        self.kernels = _Kernels(self)

    def part(self, handle: Any, row0: int, row1: int, col0: int, col1: int) -> Any:
        return super().part(array_of(handle), row0, row1, col0, col1)

    def gemm(self, a: Any, b: Any, c: Any, accumulate: bool, add: list[Any]) -> None:
        added = [array_of(term) for term in add]
        super().gemm(array_of(a), array_of(b), array_of(c), accumulate, added)

    def gemms(self, a: Any, b: Any, c: Any, accumulate: bool, add: list[Any]) -> None:
        a, c = (slots._replace(first=array_of(slots.first)) for slots in (a, c))
        super().gemms(a, array_of(b), c, accumulate, [array_of(term) for term in add])

    def reduce(self, sources: list[Any], target: Any) -> None:
        super().reduce([array_of(source) for source in sources], array_of(target))

    def sum(self, slots: Any, own: Any, own_at: int, bias: Any, target: Any) -> None:
        slots = slots._replace(first=array_of(slots.first))
        super().sum(slots, array_of(own), own_at, array_of(bias), array_of(target))

    def place(self, handle: Any) -> tuple[int, int]:
        if isinstance(handle, Tensor) and handle.numel():
            storage = handle.untyped_storage()
            if storage.data_ptr() not in self._known | self._kept:
                self._calls.register(storage.data_ptr(), storage.nbytes())
                self._known[storage.data_ptr()] = storage
        return super().place(array_of(handle))

    def keep(self) -> None:
        """Keep what calls know that a graph makes again."""
        self._kept |= self._known | {id(made): made for made in self._made}
        self._known.clear()
        self._made.clear()

    def forget(self) -> None:
        """Let the memory of tensors go, of which no call that was made knows any more."""
        for address in self._known:
            self._calls.unregister(address)
        self._known.clear()
        self._made.clear()

    def reads(self, handle: Any) -> bool:
        found = array_of(handle)  # as on GPUs, where kernels read rows or columns
        return found.itemsize in found.strides and not (
            isinstance(handle, Tensor) and handle.is_neg()
        )

    def operand(self, handle: Any) -> Any:
        found = array_of(handle)
        if not self.reads(found):
            found = found.copy()
        self._made.append(found)  # PyTorch's own memory is given again in stream order
        return found

    def fill_nan(self, handle: Any) -> None:
        super().fill_nan(array_of(handle))


def array_of(handle: Any) -> Any:
    from ficco.api.calling import _array

    return _array(handle) if isinstance(handle, Tensor) else handle


class Rank:
    """This process as a rank on the device of its number.

    Attributes:
        cuda: the driver, with the device's context current.
        stream: the current stream.
        waits: whether every call is waited for.
        allocate: allocates a result of a repeated call, by its shape, strides and dtype.
    """

    device_name = "NVIDIA H200"

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.waits, self.allocate = rank, True, _empty
        self.calls = self._open()
        self.stream = self.calls.new_stream()
        self.compute: Any = self._compute()
        self._folder, self._files = folder, 0
        self._mapped: list[Any] = []  # for ever, as graphs may hold them

    def _open(self) -> Calls:
        """Make the rank's device current; return its driver's calls."""
        self.cuda = Cuda()
        self.cuda.use(self.rank)
        return CudaCalls(self.cuda)

    def _compute(self) -> Any:
        return OnTensors(self.rank, self.stream, self.calls)

    # ---- the current stream

    def synchronize(self, device: Any = None) -> None:
        self.calls.synchronize(self.stream)
        assert not self.compute.errors, self.compute.errors[0]

    def capturing(self) -> bool:
        return self.calls.capturing(self.stream)

    def capture(self, calls: Callable[[], Any]) -> Any:
        """Return an executable graph of what is enqueued; tensors must live as long."""
        self.calls.begin_capture(self.stream)
        try:
            calls()
        finally:
            graph = self.calls.end_capture(self.stream)
        return graph

    def replay(self, graph: Any) -> None:
        """Launch a graph and wait for it."""
        self.calls.launch(graph, self.stream)
        self.synchronize()

    # ---- symmetric memory

    def empty(self, size: int, dtype: Any, device: Any) -> Tensor:
        """Allocate what all ranks can map."""
        self._files += 1
        path = self._folder / f"symmetric{self.rank}.{self._files}"
        path.write_bytes(bytes(size))
        memory = self._map(path)
        found = torch.frombuffer(memory, dtype=torch.uint8)
        found.path = path  # type: ignore[attr-defined]
        return found

    def rendezvous(self, memory: Any, group: Any) -> Any:
        """Return where every rank's memory is to this one."""
        paths: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(paths, str(memory.path), group=group)
        mine = dist.get_rank(group)
        return SimpleNamespace(
            buffer_ptrs=[
                memory.data_ptr() if rank == mine else _address(self._map(Path(path), rank))
                for rank, path in enumerate(paths)
            ]
        )

    def _map(self, path: Path, owner: int | None = None) -> mmap.mmap:
        """Map a file that is the memory of a rank's device; None: of this one's."""
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self._mapped.append(memory)
        self.cuda.use(self.rank if owner is None else owner)
        self.cuda.cuMemHostRegister(_address(memory), len(memory), 0)
        self.cuda.use(self.rank)
        return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_uint8.from_buffer(memory))


class _Event:
    """What of torch.cuda.Event is used: whether a stream has come to it."""

    def __init__(self, rank: Rank) -> None:
        self._calls, self._event = rank.calls, rank.calls.new_event()

    def record(self, stream: Any) -> None:
        self._calls.record(self._event, stream.cuda_stream)

    def query(self) -> bool:
        return self._calls.ended(self._event)


def dress(rank: int, world: int, folder: Path, ranks: type[Rank] = Rank) -> Rank:
    """Let this process's tensors be those of its GPU; `folder` is for windows, equal on all ranks.

    Ranks meet by gloo, which takes NCCL's place. `ranks`: the class of the rank.
    """
    import torch.distributed._symmetric_memory as symmetric

    from ficco.api import call_cache, dense_tables, table_optimizers
    from ficco.api.call_cache import CachedCall
    from ficco.kernels import pack
    from ficco.runtime import engine, library_programs, process_gpu

    here = ranks(rank, folder)
    place = torch.device(_HERE, rank)
    anything: Any = Tensor
    anything.is_cuda, anything.device = property(lambda _: True), property(lambda _: place)
    anything.get_device = lambda _: rank
    for name in ("empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "randn"):
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))
    anything.to = _to_the_cpu(Tensor.to)
    gpus = torch.cuda
    # Nothing stands for the kernels of row updates: tests/kernels and tests/gpu run them.
    if torch.version.hip is None:
        dense_tables.can_update = table_optimizers.can_update = lambda tables: False
    call_cache.current_device, call_cache.current_stream = lambda: rank, lambda device: here.stream
    library_programs.empty_on_gpu = _empty

    def empty(*facts: Any) -> Tensor:
        y = here.allocate(*facts)
        here.compute.place(y)  # the engine sees no results of prepared calls
        return y

    call_cache.empty_on_gpu = empty
    given = {
        "is_initialized": lambda: True, "current_device": lambda: rank,
        "device_count": lambda: world, "device": _nothing, "synchronize": here.synchronize,
        "is_current_stream_capturing": here.capturing, "Event": lambda: _Event(here),
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=here.stream),
        "mem_get_info": lambda device=None: (1 << 36, 1 << 36),
        "memory_reserved": lambda device=None: 0, "memory_allocated": lambda device=None: 0,
        "get_device_name": lambda device=None: here.device_name,
        "get_device_properties": lambda device=None: SimpleNamespace(
            multi_processor_count=132, major=9, minor=0, total_memory=141 << 30
        ),
    }  # fmt: skip
    for name, value in given.items():
        setattr(gpus, name, value)
    call_cache._find_call = call_cache._finder()  # which keeps functions of torch
    symmetric.empty, symmetric.rendezvous = here.empty, here.rendezvous  # type: ignore[assignment]
    engine.LEAST = LEAST
    runtime: Any = process_gpu.GpuProcessRuntime
    runtime.backend = "gloo"
    process_gpu.TorchDeviceCompute = lambda: here.compute  # type: ignore[assignment, misc]
    pack.has = lambda *_: True  # NumPy's kernels are there for all sizes
    run, run_prepared, run_known = runtime._run, runtime.run_prepared, CachedCall.run

    def settle() -> None:
        if here.capturing():
            here.compute.keep()
        elif here.waits:
            here.synchronize()
            here.compute.forget()

    def run_and_wait(self: Any, call: Any, arrays: Any) -> None:
        run(self, call, arrays)
        settle()

    def run_prepared_and_wait(self: Any, *call: Any) -> Any:
        made = run_prepared(self, *call)
        if made is not None:
            settle()
        return made

    # Of these calls the engine sees no tensors.
    def run_known_tensors(self: Any, tensors: Any) -> Any:
        for tensor in tensors:
            here.compute.place(tensor)
        return run_known(self, tensors)

    runtime._run, runtime.run_prepared = run_and_wait, run_prepared_and_wait
    CachedCall.run = run_known_tensors  # type: ignore[method-assign]
    return here


def _nothing(device: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _on_the_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **words: Any) -> Tensor:
        device = words.get("device")
        if not device or isinstance(device, int) or torch.device(device).type == _HERE:
            words.pop("device", None)
        return make(*args, **words)

    return made


def _to_the_cpu(move: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def moved(self: Tensor, *args: Any, **words: Any) -> Tensor:
        words.pop("device", None)
        rest = [a for a in args if not isinstance(a, torch.device) and a != _HERE]
        return move(self, *rest, **words) if rest or words else self

    return moved
