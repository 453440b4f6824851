"""The rule for operators with experts: their times, if all experts are chosen equally often.

    dispatch   serial        all-gather | all rows
               two_waves     tokens travel beside own rows | rows of peers
    combine    serial        all rows | sums of own experts | reduce-scatter
               push_sm       all rows, each stored at its owner | sums

Each launch reads all weights of a rank. So rows in two launches take longer than in one, if experts
have few rows. `simulator.calls` charges the same.
"""

from __future__ import annotations

from ficco.core.machine import Machine
from ficco.measure.library_sums import bytes_of_sums, calls_of_sums
from ficco.measure.selector.facts import Facts
from ficco.plan.schedule import Schedule


def expert_times_us(
    facts: Facts, machine: Machine, schedule: Schedule, pushes_us: float
) -> tuple[float, float]:
    """Return the time of a call on the devices, and on its host, in us.

    Args:
        facts: of a problem with experts.
        machine: a rated machine.
        schedule: resolved.
        pushes_us: the time of all pushes of a rank, for a schedule with copies.
    """
    dispatches = facts.gathers
    if facts.world == 1:
        whole = product_us(facts, machine, facts.m) + _sums_us(facts, machine)
        return whole, machine.costs.host_launch_us
    if schedule.transport == "collective":
        calls = 0 if dispatches else calls_of_sums(facts.topk)
        host = machine.costs.host_serial_us + calls * machine.costs.host_launch_us
        return _serial_us(facts, machine) + calls * machine.costs.launch_us, host
    costs, peers = machine.costs, facts.world - 1
    words = (peers + 2) * costs.signal_us + costs.raise_us + costs.launch_us + costs.call_us
    if dispatches and schedule.start == "local_first":
        own = facts.m / facts.world
        made = max(product_us(facts, machine, own), pushes_us)
        end = made + product_us(facts, machine, facts.m - own)
    elif dispatches:
        end = pushes_us + product_us(facts, machine, facts.m)
    else:
        send = machine.link.transfer_us(facts.piece_bytes) + costs.signal_us
        send *= 1 if machine.link.per == "pair" else peers
        end = max(product_us(facts, machine, facts.m), send) + _sums_us(facts, machine)
    launches = 2 + (dispatches and schedule.start == "local_first")
    pushes = peers * schedule.chunks * dispatches
    host = costs.host_call_us + launches * costs.host_kernel_us
    host += (3 + pushes) * costs.host_words_us + pushes * costs.host_copy_us
    return end + words, host


def product_us(facts: Facts, machine: Machine, rows: float) -> float:
    """Return the time of one launch of these rows: at least that of reading all weights."""
    read = facts.weight_bytes + rows * (facts.n + facts.k) * facts.item
    made = machine.gemm_us(max(rows, 1.0), facts.n, facts.k, facts.dtype)
    return max(made, machine.stream_us(read)) + machine.costs.launch_us


def _sums_us(facts: Facts, machine: Machine) -> float:
    """Return the time of adding up the rows of each token; 0 if tokens are sent to experts."""
    if facts.gathers:
        return 0.0
    return machine.stream_us((facts.m + facts.tokens) * facts.n * facts.item)


def _serial_us(facts: Facts, machine: Machine) -> float:
    """Return the time of whole transfers by a collective."""
    moved = facts.tokens * (facts.k if facts.gathers else facts.n) * facts.item
    sent = moved * (facts.world - 1)
    whole = product_us(facts, machine, facts.m)
    if not facts.gathers:  # rows are stored at their slots, and added up by PyTorch
        slots = facts.m * facts.world
        whole += machine.stream_us(bytes_of_sums(slots, facts.n, facts.item))
    return whole + machine.collective_us(facts.flow.collective, sent, facts.world)
