"""The rule's times of calls of one launch, whose kernel stores at peers or reads from them."""

from __future__ import annotations

from ficco.core.machine import SLICED_ROWS, Machine
from ficco.lowering.one_kernel import slices
from ficco.lowering.one_kernel_all_reduce import is_made_before
from ficco.lowering.sending import sends
from ficco.measure.selector.facts import Facts
from ficco.measure.tile_rounds import with_rounds
from ficco.plan.schedule import Schedule


def one_launch(
    facts: Facts, machine: Machine, schedule: Schedule, whole: float
) -> tuple[float, float]:
    """Return the times of a call of one launch on the devices, and on its host.

    whole: the time of the GEMM, which a library may make in a launch of its own.
    """
    costs, moves = machine.costs, schedule.moves
    host = costs.host_direct_us or costs.host_call_us + costs.host_kernel_us
    if moves or (_is_made_before(facts, schedule) and schedule.for_few_rows):
        host += costs.host_product_us or costs.host_launch_us
    if facts.flow.pools:
        return _pooled(facts, machine, whole), host
    if moves and facts.gathers:
        return _kept(facts, machine, schedule) + costs.launch_us + whole, host
    if moves:
        return whole + _pulled(facts, machine, schedule), host
    if sends(schedule, facts.flow):
        return _sent(facts, machine, schedule, whole), host
    return _one_kernel(facts, machine, schedule, whole), host


def _pooled(facts: Facts, machine: Machine, whole: float) -> float:
    """Return the time of one launch that pools bags and stores them at peers at the same time.

    whole: the time to pool all bags.
    """
    links = facts.world - 1 if machine.link.per == "pair" else 1
    send = facts.sent_bytes / (links * machine.link.peak_gbps * 1e3)
    fixed = machine.costs.launch_us + machine.costs.direct_us + machine.costs.store_us
    return fixed + max(whole, send) + machine.stream_us(2 * facts.sent_bytes)


def _sent(facts: Facts, machine: Machine, schedule: Schedule, whole: float) -> float:
    """Return the time of one launch that sends rows, or products by rows, while it multiplies.

    The last chunk has to arrive, and is then multiplied, or added to own products, or moved. Shared
    sums travel a second time.
    """
    costs, grain = machine.costs, schedule.chunks
    parts = [facts.m / facts.world] + [facts.m / facts.world / grain] * (facts.world - 1) * grain
    if facts.flow.sums:  # own rows have as many chunks
        parts = [facts.m / facts.world / grain] * facts.world * grain
    made = whole * (costs.sending_gemm or costs.gated_gemm)
    made, _ = with_rounds(
        machine, facts.dtype, parts, [facts.n] * len(parts), facts.k, made, 0.0, split=False
    )
    links = facts.world - 1 if machine.link.per == "pair" else 1
    passes = facts.flow.passes
    once = facts.sent_bytes / passes
    send = once / (links * machine.link.peak_gbps * 1e3)
    if facts.gathers:  # copied by programs
        send *= costs.peer_reads
    fixed = costs.launch_us + costs.direct_us + passes * costs.store_us
    if facts.gathers:
        return fixed + max(made, send + made / (grain * facts.world))
    moved = machine.stream_us(2 * once)
    # Programs multiply at the same time, and then all store at peers.
    if facts.flow.finish == "move":
        return fixed + made + send + moved
    return fixed + made + passes * send + (moved if facts.flow.shares else 0.0)


def _kept(facts: Facts, machine: Machine, schedule: Schedule) -> float:
    """Return the time of one launch that sends rows of x, and keeps those of all ranks.

    The last chunk is copied out of the window when it has arrived.
    """
    costs = machine.costs
    links = facts.world - 1 if machine.link.per == "pair" else 1
    send = costs.peer_reads * facts.sent_bytes / (links * machine.link.peak_gbps * 1e3)
    moved = machine.stream_us(2 * facts.sent_bytes) / schedule.chunks
    return costs.launch_us + costs.direct_us + costs.store_us + send + moved


def _is_made_before(facts: Facts, schedule: Schedule) -> bool:
    return facts.flow.shares and is_made_before(facts.m, schedule.shots == "two")


def _one_kernel(facts: Facts, machine: Machine, schedule: Schedule, whole: float) -> float:
    """Return the time of one launch that stores at peers, multiplies, and adds up if needed."""
    costs, world = machine.costs, facts.world
    twice = schedule.shots == "two" and not facts.gathers
    rows = facts.m * facts.n * facts.item
    sent = rows * (world - 1) * (2 / world if twice else 1)
    moved = machine.stream_us((world + 1) * rows * (1 / world if twice else 1))
    if facts.gathers:
        sent, moved = facts.sent_bytes, 0.0
        whole *= costs.direct_gemm
    links = world - 1 if machine.link.per == "pair" else 1
    send = sent / (links * machine.link.peak_gbps * 1e3)
    if _is_made_before(facts, schedule):  # in a separate launch
        whole += costs.launch_us
        moved += machine.stream_us(2 * rows * (world - 1) / world)
    elif not facts.gathers:
        programs = len(slices(facts.n, schedule.chunks))
        sliced = machine.sliced_gemm_us(facts.m, facts.n, facts.k, facts.dtype, programs)
        whole = sliced if facts.m > SLICED_ROWS else whole
    rendezvous = costs.direct_us if facts.gathers else 0.0
    fixed = costs.launch_us + rendezvous + (2 if twice else 1) * costs.store_us
    return fixed + whole + send + moved


def _pulled(facts: Facts, machine: Machine, schedule: Schedule) -> float:
    """Return the time of the launch that reads peers' products, behind the GEMM."""
    costs, world = machine.costs, facts.world
    twice = schedule.shots == "two" and facts.flow.shares
    read: float = facts.sent_bytes
    if facts.flow.shares:
        read = facts.m * facts.n * facts.item * (world - 1) * (2 / world if twice else 1)
    links = world - 1 if machine.link.per == "pair" else 1
    moved = costs.peer_reads * read / (links * machine.link.peak_gbps * 1e3)
    return costs.launch_us + costs.pulling_us(twice) + moved
