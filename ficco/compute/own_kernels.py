"""Ficco's own kernels, for any array library; see `DeviceKernels`.

A subclass defines the array library and the device. Kernels are loaded from the pack or compiled;
native code enqueues them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ficco.compute import (
    GatedOperands,
    OneKernelOperands,
    OneKernelWindows,
    PoolOperands,
    SumOperands,
    WholeOperands,
)
from ficco.errors import InputError
from ficco.kernels import (
    gated,
    loading,
    native_launch,
    one_kernel,
    one_kernel_all_reduce,
    one_kernel_gather,
    one_kernel_pool,
    pooled_tables,
    pulled_all_reduce,
    summing,
    table_operands,
)
from ficco.kernels.arrays import Address, Arrays, address, item_bytes, stride
from ficco.kernels.native_launch import LaunchSpec, Pitch, Place, Slot
from ficco.kernels.variants import Launch
from ficco.kernels.window_release import release_table
from ficco.lowering.one_kernel_gather import MOST_OUTPUTS
from ficco.tables import (
    GatedPart,
    GatherTable,
    OneKernelTable,
    PoolTable,
    PullTable,
    WholeTable,
    WindowRelease,
)

__all__ = ["OwnKernels", "Prepared", "gated_arguments", "one_kernel_places"]


class Prepared(NamedTuple):
    """A prepared GEMM, its stop and status words, its timeout, and where it reports, or None."""

    table: gated.Table
    stop: Address
    status: Any
    timeout_ns: int
    missed: Address | None = None


class Whole(NamedTuple):
    """A prepared whole call: the kernel's module, its prepared table, and the end of its waits."""

    kernel: Any
    made: Any
    control: one_kernel.Control


_KERNELS: dict[type, Any] = {
    OneKernelTable: one_kernel_all_reduce,
    GatherTable: one_kernel_gather,
    PullTable: pulled_all_reduce,
    PoolTable: one_kernel_pool,
}


def _whole_operands(prepared: Whole, operands: WholeOperands) -> Any:
    """Return operands in the form of the kernel's own module."""
    if isinstance(operands, PoolOperands):
        return table_operands.TableOperands(*operands)
    if prepared.kernel is one_kernel_gather:
        outputs = [one_kernel_gather.Matrices(*output) for output in operands.outputs]
        return one_kernel_gather.Operands(operands.x, outputs, operands.kept)
    if prepared.kernel is pulled_all_reduce:
        (output,) = operands.outputs
        return pulled_all_reduce.Operands(output.bias, output.y)
    return one_kernel_all_reduce.Operands(operands.x, *operands.outputs[0])


class OwnKernels:
    """See `ficco.compute.DeviceKernels`."""

    def arrays(self) -> Arrays:
        """Return the array library for the current device."""
        raise NotImplementedError

    def check_allocates(self) -> None:
        """Check that memory may be allocated now.

        Raises:
            InputError: the current stream is captured into a graph.
        """
        raise NotImplementedError

    def prepare(  # noqa: PLR0913 - a launch has as many facts
        self,
        parts: Sequence[GatedPart],
        n: int,
        k: int,
        dtype: str,
        timeout_s: float,
        stop_word: Callable[[], int],
        begun: bool = False,
        release: WindowRelease | None = None,
        missed_word: int = 0,
        leaves: int = 0,
    ) -> Prepared:
        """See `DeviceKernels.prepare`.

        Raises:
            InputError: the launch should report a word that it misses, for which there is no code.
        """
        if missed_word:
            raise InputError("the gated kernels of CUDA report no word; compile for cuda_target")
        self.check_allocates()
        arrays = self.arrays()
        # The stop word identifies the group, whose calls never overlap.
        stop = stop_word()
        words = None if release is None else release_table(release, arrays)
        table = gated.prepare(
            parts, n, k, dtype, arrays, begun=begun, turn_of=stop, release=words, leaves=leaves
        )
        return Prepared(table, Address(stop), arrays.place([0], "int32"), round(1e9 * timeout_s))

    def place(self, b: Any) -> tuple[int, int, bool]:
        """See `DeviceKernels.place`."""
        down, along = stride(b, 0), stride(b, 1)
        return address(b), max(down, along) * item_bytes(b), down == 1 and along != 1

    def arm(self, prepared: Prepared, operands: GatedOperands) -> Callable[[], None]:
        """See `DeviceKernels.arm`."""
        launch = self.launch_of(prepared, operands)
        return _nothing if launch is None else loading.prepared(launch)

    def launch_of(self, prepared: Prepared, operands: GatedOperands) -> Launch | None:
        """Return the launch that `arm` enqueues, or None."""
        table, matrices, gate = gated_arguments(prepared, operands)
        return gated.launch_of(table, matrices, gate) if table.tiles else None

    def described(
        self, prepared: Prepared, operands: GatedOperands, places: GatedOperands
    ) -> LaunchSpec | None:
        """See `DeviceKernels.described`."""
        launch = self.launch_of(prepared, operands)
        if launch is None:
            return None
        where = _places(launch.arguments, prepared.table, operands, places)
        return _described(launch, where)

    def prepare_one_kernel(
        self,
        table: WholeTable,
        windows: OneKernelWindows,
        digest: int,
        timeout_s: float,
        missed_word: int,
        stop_word: Callable[[], int],
    ) -> Whole:
        """See `DeviceKernels.prepare_one_kernel`."""
        self.check_allocates()
        arrays = self.arrays()
        counts = Address(windows.counts) if windows.counts else None
        places = one_kernel.Places(windows.words, windows.data, counts)
        missed, stop = Address(missed_word), Address(stop_word())  # not in a capture: checked above
        control = one_kernel.Control(digest, stop, missed, round(1e9 * timeout_s))
        kernel = _KERNELS[type(table)]
        return Whole(kernel, kernel.prepare(table, places, arrays), control)

    def arm_one_kernel(
        self, prepared: Whole, operands: WholeOperands, copy: int
    ) -> Callable[[], None]:
        """See `DeviceKernels.arm_one_kernel`."""
        return loading.prepared(self.one_kernel_launch(prepared, operands, copy))

    def one_kernel_launch(self, prepared: Whole, operands: WholeOperands, copy: int = 0) -> Launch:
        """Return the launch that `arm_one_kernel` enqueues."""
        kernel, table, control = prepared
        # The device counts the copies of mailboxes by itself.
        which = () if kernel is one_kernel_all_reduce else (copy,)
        matrices = _whole_operands(prepared, operands)
        launch: Launch = kernel.launch_of(table, matrices, control, *which)
        return launch

    def described_one_kernel(
        self, prepared: Whole, operands: WholeOperands, places: WholeOperands
    ) -> LaunchSpec:
        """See `DeviceKernels.described_one_kernel`."""
        launch = self.one_kernel_launch(prepared, operands)
        if isinstance(operands, PoolOperands) or isinstance(places, PoolOperands):
            where = pool_places(launch, operands, places, "y") | {"copy": native_launch.Copy()}
            return _described(launch, where, table_operands.divisors_of(launch, "y"))
        if prepared.kernel is pulled_all_reduce:
            return _described(launch, _pull_places(operands, places))
        return _described(
            launch, one_kernel_places(operands, places, prepared.kernel is one_kernel_gather)
        )  # fmt: skip

    def prepare_pool(
        self, dims: Sequence[int], modes: Sequence[str], columns: Sequence[int], dtype: str
    ) -> pooled_tables.Pooled:
        """See `DeviceKernels.prepare_pool`."""
        self.check_allocates()
        return pooled_tables.prepare(dims, modes, dtype, self.arrays(), columns)

    def arm_pool(
        self, prepared: pooled_tables.Pooled, operands: PoolOperands, first: int
    ) -> Callable[[], None]:
        """See `DeviceKernels.arm_pool`."""
        launch = self.pool_launch(prepared, operands, first)
        return _nothing if launch is None else loading.prepared(launch)

    def pool_launch(
        self, prepared: pooled_tables.Pooled, operands: PoolOperands, first: int
    ) -> Launch | None:
        """Return the launch that `arm_pool` enqueues, or None."""
        return pooled_tables.launch_of(prepared, table_operands.TableOperands(*operands), first)

    def described_pool(
        self,
        prepared: pooled_tables.Pooled,
        operands: PoolOperands,
        places: PoolOperands,
        first: int,
    ) -> LaunchSpec | None:
        """See `DeviceKernels.described_pool`."""
        launch = self.pool_launch(prepared, operands, first)
        if launch is None:
            return None
        where = pool_places(launch, operands, places, "target")
        return _described(launch, where, table_operands.divisors_of(launch, "target"))

    def described_sum(
        self, operands: SumOperands, places: SumOperands, count: int, distance: int, own_at: int
    ) -> LaunchSpec | None:
        """See `DeviceKernels.described_sum`."""
        launch = self.sum_launch(operands, count, distance, own_at)
        if launch is None:
            return None
        where: dict[str, Place] = {
            "target": places.target, "slots": places.slots, "own": places.own,
            "bias": places.target if places.bias is None else places.bias,
        }  # fmt: skip
        for name in ("target", "slots", "own"):
            place, size = getattr(places, name), item_bytes(getattr(operands, name))
            where[f"{name}_stride"] = Pitch(place.slot, size)
        return _described(launch, where)

    def sum_launch(
        self, operands: SumOperands, count: int, distance: int, own_at: int
    ) -> Launch | None:
        """Return the launch of a sum, or None if the target is empty."""
        slots, own, bias, target = operands
        if not target.shape[0] or not target.shape[1]:
            return None
        return summing.launch_of(
            slots, distance, count, own, own_at, bias, target, self.arrays()
        )  # fmt: skip


def _nothing() -> None:
    """Enqueue nothing."""


def _described(
    launch: Launch, places: dict[str, Place], divisors: Mapping[str, int] | None = None
) -> LaunchSpec:
    code = loading.code(launch)
    return native_launch.described(
        code, launch.grid, launch.arguments, places, launch.chained, divisors or {}
    )


def one_kernel_places(
    operands: OneKernelOperands, places: OneKernelOperands, gathers: bool
) -> dict[str, Place]:
    """Return the places of the arguments of a call that is one kernel, by name.

    Args:
        operands: handles, for their strides.
        places: places of the operands.
        gathers: whether the kernel is the one-kernel gather.
    """
    item = item_bytes(operands.x)
    by_name: dict[str, Place] = {
        "x": places.x, "x_stride": Pitch(places.x.slot, item)
    }  # fmt: skip
    for number in range(MOST_OUTPUTS if gathers else 1):
        n = str(number) if gathers else ""
        if number >= len(operands.outputs):  # the kernel does not read these
            by_name |= dict.fromkeys((f"w{n}", f"bias{n}", f"y{n}"), places.x)
            continue
        (w, _, _), at = operands.outputs[number], places.outputs[number]
        deep = "deep" if stride(w, 1) == 1 else "col"
        by_name |= {
            f"w{n}": at.w, f"y{n}": at.y, f"bias{n}": at.y if at.bias is None else at.bias,
            f"y{n}_stride": Pitch(at.y.slot, item), f"w{n}_{deep}_stride": Pitch(at.w.slot, item),
        }  # fmt: skip
    if gathers:
        by_name["copy"] = native_launch.Copy()
        by_name["kept"] = places.x if places.kept is None else places.kept
    if places.kept is not None:
        by_name["kept_stride"] = Pitch(places.kept.slot, item)
    return by_name


def pool_places(launch: Launch, operands: Any, places: Any, target: str) -> dict[str, Place]:
    """Return the places of the arguments of a launch that pools bags of several tables, by name.

    Args:
        launch: the launch; its tuples repeat their first element.
        operands: handles; a matrix of indices that is empty has no pitch.
        places: places of the operands.
        target: the name of the argument that is the result.
    """
    item, y = item_bytes(operands.y), places.y
    by_name: dict[str, Place] = {target: y, f"{target}_stride": Pitch(y.slot, item)}
    for i in range(len(launch.arguments["tables"])):
        j = i if i < len(places.tables) else 0
        table, indices, offsets = (
            (places.tables[j], places.indices[j], places.offsets[j]) if places.tables else (y, y, y)
        )
        by_name |= {f"tables.{i}": table, f"indices.{i}": indices, f"offsets.{i}": offsets}
        if i < len(launch.arguments["weights"]):
            given = table_operands.filled_weights(places.weights, y)
            by_name[f"weights.{i}"] = given[i]
        if places.tables:
            by_name[f"strides.{i}"] = Pitch(table.slot, item)
            if operands.indices[j].shape[1]:
                by_name[f"ends.{i}"] = Pitch(indices.slot, item_bytes(operands.indices[j]))
    return by_name


def _pull_places(operands: OneKernelOperands, places: OneKernelOperands) -> dict[str, Place]:
    """Return the places of the arguments of an all-reduce that reads peers' products, by name."""
    ((_, _, y),), ((_, bias_at, y_at),) = operands.outputs, places.outputs
    return {
        "y": y_at, "bias": y_at if bias_at is None else bias_at,
        "y_stride": Pitch(y_at.slot, item_bytes(y)), "copy": native_launch.Copy(),
    }  # fmt: skip


def gated_arguments(
    prepared: Prepared, operands: GatedOperands
) -> tuple[gated.Table, gated.Matrices, gated.Gate]:
    """Return the table, the operands and the words of a launch."""
    table, stop, status, timeout_ns, missed = prepared
    own, window, b, bias, c, partial, recv, words, copy = operands
    matrices = gated.Matrices(own, window, b, bias, c, partial, recv)
    gate = gated.Gate(words, stop, status, timeout_ns, copy=copy, missed=missed)
    return table, matrices, gate


def _places(
    arguments: dict[str, Any], table: gated.Table, operands: GatedOperands, places: GatedOperands
) -> dict[str, Place]:
    """Return the places of the arguments that differ between calls, by name."""
    own: Any
    window: Any
    own, window, b, bias, c, partial, recv, words, copy = places
    if not table.own_tiles:  # own and window stand in for each other if one has no tiles
        own = window
    elif table.own_tiles == table.tiles:
        window = own
    by_name: dict[str, Place] = {
        "own": own, "window": window, "b": b, "bias": c if bias is None else bias, "c": c,
        "words": words, "copy": copy,
    }  # fmt: skip
    if table.signalling is not None:
        by_name |= {"partial": c if partial is None else partial}
        by_name["recv"] = c if recv is None else recv
        by_name["signals"] = words
    item = item_bytes(table.dtype)
    pitches: list[tuple[str, Slot, int]] = [
        ("own_stride", own, item), ("window_stride", window, item),
        ("c_stride", c, item_bytes(operands.c)),
    ]  # fmt: skip
    if table.signalling is not None:
        other = operands.c if operands.partial is None else operands.partial
        received = operands.c if operands.recv is None else operands.recv
        place = c if partial is None else partial
        pitches += [("partial_stride", place, item_bytes(other))]
        pitches += [("recv_stride", c if recv is None else recv, item_bytes(received))]
    along = "b_deep_stride" if stride(operands.b, 1) == 1 else "b_col_stride"
    pitches.append((along, b, item))
    by_name |= {name: Pitch(slot.slot, size) for name, slot, size in pitches if arguments.get(name)}
    return {name: place for name, place in by_name.items() if name in arguments}
