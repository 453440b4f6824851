"""The rule: an estimate of a schedule's time from static numbers only, computed in microseconds.

The estimate uses bytes over the link's rate, the times of GEMMs that were measured or that follow
from those nearby, and a few fixed costs. One lane sends and one multiplies, and the later end
counts. L is the time to send everything, c the time to multiply one of s pieces, own the time of
the own shard, and a is the number of parts that arrive one after another:

    gathers     max(own + s.c,  L / a + s.c,  L + c.s / a)     a piece is multiplied on arrival
    scatters    max(c.s / a + L,  s.c + L / a,  s.c + own)     a piece is sent when it is made

Each of q peers has g chunks. s is g if a whole step is multiplied at once (`per_step`), and g.q if
each chunk is. a is g if a rank sends to all peers at once or waits for whole steps, else g.q. Sums
that circulate on a ring have other formulas: see `_ring`.
The rule simulates no machine, and nothing else in ficco uses these formulas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ficco.core.errors import bytes_text, counted, duration_text
from ficco.core.machine import Link, Machine
from ficco.lowering.cutting import chunk_bounds
from ficco.lowering.scattering import finishes_between
from ficco.measure.selector.expert_rule import expert_times_us
from ficco.measure.selector.facts import Facts
from ficco.measure.selector.one_launch import one_launch
from ficco.measure.tile_rounds import with_rounds
from ficco.plan.schedule import Schedule

# Host time of a call that begins behind a wait for the device, over that of one behind another
# call, likely because the processor's caches are cold. On 1,320 measured calls on 2 and 4 H200s,
# the error was least with this factor, of 1, 1.5 and 2 (bench/NOTES.md).
HOST_AFTER_WAIT = 1.5
# Host time of calls among others, over a profile's, the least of several loops. In five reports of
# 2 H100s it was 1.6 to 2.3 for calls that native code or torch.distributed launches, and 0.8 to 1.6
# for calls by copies, which make many driver calls one after another (bench/NOTES.md).
_AMONG_OTHERS, _COPIES_AMONG_OTHERS = 2.0, 1.3
MARGIN = 0.03  # the least gain over serial, or over a plainer schedule, for a schedule to be chosen


def _transfer_us(link: Link, facts: Facts, schedule: Schedule) -> float:
    """Return the time of all pushes of a rank, one after another or to all peers at once."""
    peers, chunks = facts.world - 1, schedule.chunks
    chunk = facts.piece_bytes / chunks
    if schedule.route == "rotation":
        turn = link.turn_us.at(chunk) if link.turn_us and schedule.pace == "free" else 0.0
        turns = peers * (chunks if schedule.order == "by_step" else 1)
        return peers * chunks * link.transfer_us(round(chunk)) + turns * turn
    rate = link.gbps_at(round(chunk))
    if link.out_gbps:
        rate = min(rate, link.out_gbps.at(peers) / peers)
    elif link.per == "port":
        rate /= peers
    return chunks * (link.latency_us + chunk / (rate * 1e3))


def _own_us(facts: Facts, machine: Machine, schedule: Schedule) -> float:
    """Return the time to make the own part; chunk by chunk if each step finishes a chunk."""
    rows = facts.m / facts.world
    if schedule.compute == "gated":
        return _gated_us(facts, machine, [rows / schedule.chunks] * schedule.chunks)[0]
    chunks = schedule.chunks if schedule.cut == "rows" else 1
    if not facts.flow.shares or not finishes_between(schedule):
        chunks = 1
    return chunks * _work(facts, machine, rows / chunks)


def _send_us(facts: Facts, machine: Machine, schedule: Schedule) -> float:
    """Return the time of all pushes of a rank and their signals, concurrent with GEMMs."""
    costs = machine.costs
    moved = _transfer_us(machine.link, facts, schedule) * costs.copies_beside_gemm
    return moved + costs.signal_us * (facts.world - 1) * schedule.chunks


def estimate_us(
    facts: Facts, machine: Machine, schedule: Schedule, regime: str, among_others: bool = False
) -> float:
    """Return the expected time of a call, in us, in one of `ficco.plan.timeline.REGIMES`.

    among_others: whether the host does other work between such calls. It does not matter for the
    host engine, whose ranks do the work of the call themselves.
    """
    return in_regime(times_us(facts, machine, schedule), machine, schedule, regime, among_others)


def in_regime(
    times: tuple[float, float], machine: Machine, schedule: Schedule, regime: str,
    among_others: bool,
) -> float:  # fmt: skip
    """Return the time of `estimate_us` from the times that `times_us` returns."""
    device, host = times
    if among_others and machine.engine != "host":
        copies = schedule.transport == "dma" and schedule.compute != "gated"
        host *= _COPIES_AMONG_OTHERS if copies else _AMONG_OTHERS
    if regime == "captured":
        return device
    if regime == "eager":
        return max(device, host)
    return device + HOST_AFTER_WAIT * host


def _work(facts: Facts, machine: Machine, rows: float) -> float:
    """Return the time to make `rows` rows of the product, in one piece."""
    if not facts.flops:
        return machine.stream_us(rows * facts.n * facts.item * (facts.k + 1))
    return machine.gemm_us(rows, facts.n, facts.k, facts.dtype)


def times_us(facts: Facts, machine: Machine, schedule: Schedule) -> tuple[float, float]:
    """Return the time of a call on the devices, and on its host, in us."""
    if facts.flow.routes:
        pushes_us = _send_us(facts, machine, schedule)
        return expert_times_us(facts, machine, schedule, pushes_us)
    return _times_us(facts, machine, schedule)


def _times_us(facts: Facts, machine: Machine, schedule: Schedule) -> tuple[float, float]:
    """Return the same for an operator without experts."""
    costs, world, m = machine.costs, facts.world, facts.m
    schedule, edge, more = _uncut(facts, schedule)
    whole = _work(facts, machine, m)
    if world == 1:
        return whole + bool(machine.cores) * (costs.launch_us + costs.call_us), costs.host_launch_us
    if schedule.transport == "collective":
        moved = machine.collective_us(facts.flow.collective, facts.sent_bytes, world)
        return costs.launch_us + whole + moved, costs.host_serial_us
    if schedule.transport == "sm":
        return one_launch(facts, machine, schedule, whole)
    if schedule.sums == "along":
        return _ring(facts, machine, schedule)
    peers, grain = world - 1, schedule.chunks
    send = send_on = _send_us(facts, machine, schedule)
    if facts.flow.shares:  # partial sums have no turns
        send = _send_us(facts, machine, replace(schedule, pace="free"))
    send += more * (costs.signal_us + machine.link.latency_us * costs.copies_beside_gemm)
    cut, steps, calls = _steps(facts, schedule)
    fused = steps == (1 if schedule.compute == "whole" else grain)
    arrivals = grain if fused or schedule.route == "all_peers" else grain * peers
    piece, own, last = _parts(facts, machine, schedule, (cut, steps, calls), more)
    block = m * facts.n / world * facts.item
    words = (peers + 2) * costs.signal_us + costs.raise_us  # at the beginning
    told = 0.0  # the signals of copies, on streams of their own: they delay arrivals, no products
    if not (schedule.compute == "gated" or machine.cores):
        told, words = words + costs.raise_us, 0.0
        piece -= costs.raise_us
    late = max(steps * piece / arrivals * edge, last) + told
    made = steps * piece + own
    if facts.gathers:
        stage = machine.stream_us(2.0 * facts.piece_bytes) if cut == world else 0.0
        end = max(stage + made, told + send / arrivals + steps * piece, send + late)
        worked = stage + made + send
    else:
        sent = max(late + send, steps * piece + told + send / arrivals)
        last = machine.stream_us((world + 1) * block)  # add up, or move into the output
        worked = made + send + last
        if schedule.sums == "within":  # with the own tiles' product; the last comes after all
            last = own / grain
            made -= last
        at_once = facts.flow.finish == "sum" and schedule.order == "by_peer"
        end = max(made + last, sent + last / (1 if schedule.sums == "within" or at_once else grain))
        if facts.flow.shares:
            # Sums that arrive in turns are moved in turns; only the last move is not hidden.
            moved = machine.stream_us(2.0 * block * (1 if schedule.route == "rotation" else peers))
            parts = _Sums(steps * piece, own, late, send, send_on, sent, made, last, moved)
            # Sums are signalled to the lane that pushes them, and to the lane that moves them.
            end = _passed_on(parts, schedule, peers) + 2 * costs.raise_us + costs.launch_us
            worked += send_on + moved
    end = _on_cores(end, worked, machine, world)
    if not (facts.gathers and schedule.compute == "gated"):  # its launch handles the last signals
        words += _release_us(machine, peers)
    pushes = _pushes(facts, schedule) + more
    host = _calling_us(facts, schedule, machine, steps * calls)
    host += (steps + more + 2 + pushes) * costs.host_words_us + pushes * costs.host_copy_us
    return end + words + costs.call_us, host


def _parts(
    facts: Facts, machine: Machine, schedule: Schedule, counts: tuple[int, int, int], more: int
) -> tuple[float, float, float]:
    """Return the times of a step of the work, of the own part, and of the last part to arrive.

    The last is 0 if a step is all that follows an arrival. `counts`: see `_steps`; `more`: see
    `_uncut`.
    """
    if facts.gathers and schedule.compute == "gated":
        return _gathering(facts, machine, schedule, counts[1], more)
    own = 0.0 if schedule.start == "together" else _own_us(facts, machine, schedule)
    return _step_us(facts, machine, schedule, *counts), own, 0.0


def _step_us(
    facts: Facts, machine: Machine, schedule: Schedule, cut: int, steps: int, calls: int
) -> float:
    """Return the time of a step of the work, concurrent with copies; arguments: see `_steps`."""
    costs, world, m = machine.costs, facts.world, facts.m
    if schedule.compute == "gated":
        piece = _gated_us(facts, machine, [m * cut / world / steps] * steps)[0] / steps
        if not machine.cores:  # parts of one launch; cores make each separately
            return piece * costs.gemm_beside_copies
    else:
        piece = _piece(facts, machine, schedule, m * cut / world / steps, calls)
    return piece * costs.gemm_beside_copies + costs.raise_us + costs.launch_us


def _gathering(
    facts: Facts, machine: Machine, schedule: Schedule, steps: int, more: int
) -> tuple[float, float, float]:
    """Return the times of a step on peers' parts, of the own part, and of the last part.

    One launch makes all parts, each when it has arrived; the own part comes first.
    """
    costs, rows, peers = machine.costs, facts.m / facts.world, facts.world - 1
    heights = [rows / schedule.chunks] * (peers * schedule.chunks)
    if machine.cores:  # cores make each part separately
        work = _gated_us(facts, machine, heights)[0]
        step = work / steps * costs.gemm_beside_copies + costs.raise_us + costs.launch_us
        return step, _own_us(facts, machine, schedule), 0.0
    if more:  # one shard comes in pieces
        heights = [*heights[1:], *[rows / (more + 1)] * (more + 1)]
    whole, last = _gated_us(facts, machine, [rows, *heights])
    whole *= costs.gemm_beside_copies
    return whole * peers / facts.world / steps, whole / facts.world, last


def _gated_us(facts: Facts, machine: Machine, heights: list[float]) -> tuple[float, float]:
    """Return the time of one launch that makes parts of the product, and of its last part alone.

    The launch takes its share of the whole GEMM, but at least the rounds of its tiles.

    Args:
        facts: of the problem.
        machine: the machine.
        heights: the rows of the parts.
    """
    share = machine.costs.gated_gemm * _work(facts, machine, facts.m) / facts.m
    whole, last = share * sum(heights), share * heights[-1]
    if not facts.flops:
        return whole, last
    rows, cols = [max(1.0, height) for height in heights], [facts.n] * len(heights)
    return with_rounds(machine, facts.dtype, rows, cols, facts.k, whole, last)


def _on_cores(end: float, worked: float, machine: Machine, world: int) -> float:
    """Return the end of a call if ranks share cores.

    Args:
        end: the end with a core for each rank, in us.
        worked: the work of cores for one rank (GEMMs and copies), in us.
        machine: the machine with the cores.
        world: the number of ranks that share the cores.
    """
    if not machine.cores:
        return end
    share = world / machine.cores
    return max(end * max(share, 1.0), worked * share)


def _pushes(facts: Facts, schedule: Schedule) -> int:
    """Return the number of copies to peers in a call, for a schedule without taper="edge"."""
    chunks = schedule.chunks
    if facts.flow.shares:  # the pushes of sums
        chunks += 1 if schedule.sums_at_once else schedule.chunks
    return (facts.world - 1) * chunks


def _uncut(facts: Facts, schedule: Schedule) -> tuple[Schedule, float, int]:
    """Return a schedule without taper="edge", and two corrections for the taper.

    These are the share of one shard's work in its last (first) chunk, and the additional pushes.
    """
    if schedule.taper != "edge":
        return schedule, 1.0, 0
    bounds = chunk_bounds(round(facts.m / facts.world), schedule.chunks, "head")
    whole = replace(schedule, grain=1, taper="none")
    return whole, bounds[1] / max(bounds[-1], 1), schedule.chunks - 1


class _Sums(NamedTuple):
    """The times of an all-reduce with shots="two", and the ends of two parts, in us."""

    multiplied: float  # peers' parts
    own: float
    late: float  # the share of `multiplied` on one arrival
    send: float
    send_on: float
    sent: float  # the end: all partial sums have arrived
    made: float  # the end: all parts are multiplied, except for work that is in `last`
    last: float  # adding up
    moved: float  # copies from the window into the output


def _passed_on(sums: _Sums, schedule: Schedule, peers: int) -> float:
    """Return the time when all sums that owners push are in the output."""
    multiplied, own, late, send, send_on, sent, made, last, moved = sums
    grain = schedule.chunks
    if schedule.sums == "within":  # sums travel during products of later own chunks
        by_peer = schedule.order == "by_peer"  # the first sum needs the last peer's first chunk
        first = late + send * (1 - (grain - 1) / grain / peers if by_peer else 1 / grain)
        end = max(
            max(first, multiplied + last) + send_on,
            sent + send_on,
            max(made, sent) + last + send_on / grain,
        )
        return end + moved / grain
    if finishes_between(schedule):  # sums travel during products, except the last step's
        made += last * (1 - 1 / grain)
        end = max(
            max(made, made - own / grain + send / grain) + (last + send_on) / grain,
            # Two chunks of sums and one of products follow the last product.
            multiplied + (send + 2 * send_on + last) / grain,
            late + send + send_on + last / grain,
        )
        return end + moved / grain
    return max(made, sent) + last / grain + send_on + moved


def _ring(facts: Facts, machine: Machine, schedule: Schedule) -> tuple[float, float]:
    """Return the times of a call on the devices and on its host, for sums on a ring.

    Either GEMMs follow one another, or pushes do, after the first GEMM and before the last. If a
    chunk circulates alone, making and travelling do not overlap. The sums of the last round are
    pushed at the end.
    """
    costs, world, grain = machine.costs, facts.world, schedule.chunks
    turns, reduces = world * grain, facts.flow.shares
    once = _piece(facts, machine, schedule, facts.m / world / grain, 1)
    piece = once * costs.gemm_beside_copies + costs.launch_us
    chunk = facts.m * facts.n / world / grain * facts.item
    moved = machine.link.transfer_us(round(chunk)) * costs.copies_beside_gemm + costs.signal_us
    moved += costs.raise_us  # from a sum to its push, on another stream
    together = min(grain, 2) if reduces and schedule.order == "by_step" else grain
    added = machine.stream_us(2.5 * chunk)  # the sum that arrived: see `simulator.calls`
    passed = on = (world - 1) * grain * moved
    if machine.link.turn_us and schedule.pace == "free":  # pushes meet at receivers
        on += (world - 1) * grain * machine.link.turn_us.at(chunk)
    made = turns * piece + (turns - grain) * added + (passed if together == 1 else 0.0)
    end = max(made, 2 * piece + added + passed)
    if reduces:
        end = max(made + on * together / grain, 2 * piece + added + passed + on)
        end += machine.stream_us(2.0 * chunk * (world - 1))
    worked = turns * piece + (turns - grain) * added + passed + (on if reduces else 0.0)
    end = _on_cores(end, worked, machine, world)
    copies = (world - 1) * grain * (2 if reduces else 1)
    host = _calling_us(facts, schedule, machine, turns)
    host += (copies + turns + 2) * costs.host_words_us + copies * costs.host_copy_us
    words = (world + 1) * costs.signal_us + costs.raise_us + _release_us(machine, world - 1)
    return end + words + costs.call_us, host


def _release_us(machine: Machine, peers: int) -> float:
    """Return the time of the signals at a call's end; on GPUs one kernel stores them."""
    costs = machine.costs
    return costs.launch_us if machine.engine == "cuda" else peers * costs.signal_us


def _calling_us(facts: Facts, schedule: Schedule, machine: Machine, calls: int) -> float:
    """Return the host's time to call, and to launch the GEMMs and the steps at both ends."""
    costs = machine.costs
    if schedule.compute == "gated" and machine.engine == "cuda":
        kernels = 1 if facts.gathers else 2
        native = costs.host_native_us
        return (costs.host_call_us if native is None else native) + kernels * costs.host_kernel_us
    return costs.host_call_us + (calls + 2) * costs.host_launch_us


def _steps(facts: Facts, schedule: Schedule) -> tuple[int, int, int]:
    """Return the number of shards that are cut, the pieces of work, and GEMM calls per piece.

    The rows of a step are spread over the shards of all peers. One library call takes rows at equal
    distances, but the own shard leaves a gap, or is stored elsewhere.
    """
    peers, together = facts.world - 1, schedule.start == "together"
    cut = facts.world if together else peers
    if schedule.compute in ("per_chunk", "gated"):
        return cut, schedule.chunks * cut, 1
    steps = 1 if schedule.compute == "whole" else schedule.chunks
    if peers == 1 or (together and facts.gathers):
        return cut, steps, 1
    return cut, steps, 3 if together else 2


def _piece(facts: Facts, machine: Machine, schedule: Schedule, rows: float, calls: int) -> float:
    """Return the time of one piece of work: `rows` rows in `calls` calls."""
    if schedule.cut == "rows" or not facts.flops:
        return calls * _work(facts, machine, rows / calls)
    grain = schedule.chunks
    rows *= grain / calls  # a piece has all rows, and a slice of k or of n
    n, k = (facts.n, facts.k / grain) if facts.gathers else (facts.n / grain, facts.k)
    again = (
        2.0 * rows * n * (grain - 1) / grain if facts.gathers else 0.0
    )  # c is read again, half hidden
    return calls * (machine.gemm_us(rows, n, k, facts.dtype) + machine.stream_us(again))


def reasons(facts: Facts, machine: Machine, chosen: Schedule) -> list[str]:
    """Return the reasons in words (compute, transfer, balance, pieces), from the same numbers."""
    if facts.world == 1:
        return ["one rank: there are no transfers"]
    whole = _work(facts, machine, facts.m)
    links = facts.world - 1 if machine.link.per == "pair" else 1
    moved = facts.sent_bytes / (links * machine.link.peak_gbps * 1e3)
    notes = [
        f"compute alone about {duration_text(whole / 1e3)}, transfer alone at least "
        f"{duration_text(moved / 1e3)} ({bytes_text(facts.sent_bytes)} leave a rank)"
    ]
    if facts.flops and whole and moved:
        balance = facts.flops / whole / (facts.sent_bytes / moved)
        side = "compute-bound" if facts.intensity > balance else "link-bound"
        notes.append(
            f"{facts.intensity:.3g} operations per byte sent; the machine's balance is "
            f"{balance:.3g} at this size: {side}"
        )
    if machine.collectives and facts.world != machine.devices:
        notes.append(
            f"collectives were measured with {machine.devices} ranks, these are {facts.world}"
        )
    if 2 * facts.world > machine.cores > 0:
        notes.append(
            f"{facts.world} ranks share {counted(machine.cores, 'core')}, so copies take cores "
            "that GEMMs need"
        )
    times = machine.gemm_times(facts.dtype)
    if times is not None and times.tiled and facts.flops:
        rows = facts.m / facts.world
        whole, shard = times.rounds(facts.m, facts.n), times.rounds(rows, facts.n)
        chunk = times.rounds(rows / chosen.chunks, facts.n)
        notes.append(
            f"tiles of the whole GEMM fill the SMs {_times(whole)}, those of a shard "
            f"{_times(shard)}, those of a chunk (grain {chosen.grain_text}) {_times(chunk)}"
        )
    return notes


def _times(count: float) -> str:
    text = f"{count:.2g}"
    return f"{text} time" if text == "1" else f"{text} times"
