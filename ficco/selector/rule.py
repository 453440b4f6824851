"""The rule: what a schedule should take, from static numbers alone. Microseconds to work out.

Bytes over the link's rate, rounds of tiles over the multiprocessors, and a few fixed costs; two
lanes, one that sends and one that multiplies, of which the later one decides. With g chunks of each
of q = world - 1 peers' shards, c the time to multiply one piece, s = q.g pieces, x = L / s the time
to send one, and own the time of the own shard:

    gathers     max(own + s.c,  x + s.c,  L + c)          a piece is multiplied when it has come
    scatters    max(c + L,  s.c + x,  s.c + own)          a piece is sent when it was multiplied

(`per_step`: pieces of one step are one, s = g; `together`: the own shard is cut like the others.)
No machine is simulated here, and nothing else in ficco uses these formulas.
"""

from __future__ import annotations

from ficco.machine import Link, Machine
from ficco.schedule import Schedule
from ficco.selector.facts import COLLECTIVE, Facts

__all__ = ["MARGIN", "estimate_us", "reasons"]

MARGIN = 0.03  # a schedule must promise this much over serial, or over a plainer one, to be taken


def _gemm_us(machine: Machine, m: float, n: int, k: int, dtype: str) -> float:
    """Return the time of a GEMM by its rounds of tiles, or by the machine's plain rate."""
    times = machine.gemm_times(dtype)
    if times is None:
        return machine.paced_gemm_us(2.0 * m * n * k, dtype)
    return times.tiled_us(m, n, k)


def _transfer_us(link: Link, facts: Facts, schedule: Schedule) -> float:
    """Return how long all pushes of a rank last, one behind another or to all peers at once."""
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


def estimate_us(facts: Facts, machine: Machine, schedule: Schedule, regime: str) -> float:
    """Return what the rule expects a call to take, in us, in one of `ficco.timeline.REGIMES`."""
    device, host = _device(facts, machine, schedule)
    if regime == "captured":
        return device
    return max(device, host) + (machine.costs.host_call_us if regime == "synchronized" else 0.0)


def _work(facts: Facts, machine: Machine, rows: float) -> float:
    """Return the time to make so many rows of the product, in one piece."""
    if not facts.flops:
        return machine.stream_us(rows * facts.n * facts.item * (facts.k + 1))
    return _gemm_us(machine, rows, facts.n, facts.k, facts.dtype)


def _device(facts: Facts, machine: Machine, schedule: Schedule) -> tuple[float, float]:
    """Return a call's time on the devices, and its host's."""
    costs, world, m = machine.costs, facts.world, facts.m
    whole = _work(facts, machine, m)
    if world == 1:
        return whole, costs.host_launch_us
    if schedule.transport == "collective":
        moved = machine.collective_us(COLLECTIVE[facts.op], facts.sent_bytes)
        if moved is None:
            moved = facts.sent_bytes / (machine.link.peak_gbps * 1e3)
        return whole + moved, costs.host_serial_us
    peers, grain = world - 1, schedule.chunks
    send = _transfer_us(machine.link, facts, schedule) * costs.copies_beside_gemm
    send += (costs.signal_us * peers) * grain
    together, fused = schedule.start == "together", schedule.compute != "per_chunk"
    cut = world if together else peers  # shards of which pieces are made
    steps = 1 if schedule.compute == "whole" else grain if fused else grain * cut
    rows = m * cut / world / steps
    if schedule.cut == "columns" and facts.flops:
        piece = _gemm_us(machine, m, facts.n, max(1, facts.k // grain), facts.dtype)
        piece += machine.stream_us(4.0 * m * facts.n)
    else:
        piece = _work(facts, machine, rows)
    if schedule.compute == "gated":
        piece = whole * cut / world / steps
    piece = piece * costs.gemm_beside_copies + costs.raise_us + costs.launch_us
    own = 0.0 if together else _work(facts, machine, m / world)
    block = facts.m * facts.n / world * facts.item
    if facts.gathers:
        stage = machine.stream_us(2.0 * facts.piece_bytes) if together else 0.0
        end = max(stage + own + steps * piece, send / steps + steps * piece, send + piece)
    else:
        made = steps * piece + own
        sent = max(piece + send, steps * piece + send / steps)
        last = machine.stream_us((world + 1) * block)  # adding up, or moving into the output
        end = max(made + last, sent + last / (steps if fused else grain))
        if facts.op == "matmul_all_reduce":
            end = max(made, sent) + last / grain + send / 2 + machine.stream_us(2.0 * block * peers)
    words = (2 * peers + 2) * costs.signal_us + costs.raise_us
    host = costs.host_call_us + (steps + 2) * (costs.host_launch_us + costs.host_words_us)
    host += peers * grain * (costs.host_copy_us + costs.host_words_us)
    return end + words + costs.call_us, host


def reasons(facts: Facts, machine: Machine, chosen: Schedule) -> list[str]:
    """Say what decides, from the same numbers: compute, transfer, balance, pieces."""
    if facts.world == 1:
        return ["one rank: nothing travels"]
    whole = _work(facts, machine, facts.m)
    moved = facts.sent_bytes / (machine.link.peak_gbps * 1e3)
    if machine.link.per == "pair":
        moved /= facts.world - 1
    said = [
        f"compute alone {whole / 1e3:.3f} ms, transfer alone at least {moved / 1e3:.3f} ms "
        f"({facts.sent_bytes / 1e6:.1f} MB leave a rank): at best "
        f"{(whole + moved) / max(whole, moved):.2f}x is to be had over one after the other"
    ]
    if facts.flops and whole and moved:
        balance = facts.flops / whole / (facts.sent_bytes / moved)
        side = "compute-bound" if facts.intensity > balance else "link-bound"
        said.append(
            f"{facts.intensity:.0f} operations a byte sent; the machine's balance is "
            f"{balance:.0f}: {side}"
        )
    times = machine.gemm_times(facts.dtype)
    if times is not None and facts.flops:
        rows = facts.m / facts.world
        said.append(
            f"the whole GEMM is {times.rounds(facts.m, facts.n):.1f} rounds of tiles, that of a "
            f"shard {times.rounds(rows, facts.n):.1f}, of a chunk at grain {chosen.chunks} "
            f"{times.rounds(rows / chosen.chunks, facts.n):.1f}"
        )
    return said
