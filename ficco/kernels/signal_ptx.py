"""PTX of signals: the parts of which `signals`, mailboxes and `ficco.device` make their texts.

A function here returns lines for the inside of a block, or a whole block in braces. A block is one
statement: the compiler sees no branch, and may merge loops. `$0`, `$1` ... are the operands of the
block. Every wait has the same loop:

    read the word, an acquire | compare | read the stop words | read the clock | again

and ends at a barrier, which joins the threads and tells all of them whether one gave up.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["clock", "expired", "met", "of_first", "of_rank", "raised", "release", "wait"]

_RELEASES = {"set": "st.release.sys.global.u32", "add": "red.release.sys.global.add.u32"}


def clock(register: str) -> str:
    """Read the time in ns."""
    return f"mov.u64 {register}, %globaltimer;"


def met(predicate: str) -> str:
    """Join all threads; the predicate becomes whether it holds in any of them."""
    return f"barrier.red.or.pred {predicate}, 0, {predicate};"


def release(word: str, value: str, op: str = "set") -> str:
    """Set or add to a word: a release at system scope.

    It covers what other threads stored only if all threads have met before.
    """
    return f"{_RELEASES[op]} [{word}], {value};"


def expired(stops: Sequence[str], begin: str, limit: str) -> str:
    """Set `gave_up` if one of the stop words is not 0, or too much time has passed since `begin`.

    It uses `stopped`, `told` and `now`.
    """
    read = "ld.relaxed.sys.global.u32"
    others = [f"{read} told, [{each}];\n    or.b32 stopped, stopped, told;" for each in stops[1:]]
    reads = "\n    ".join([f"{read} stopped, [{stops[0]}];", *others])
    return f"""{reads}
    {clock("now")}
    sub.u64 now, now, {begin};
    setp.gt.u64 gave_up, now, {limit};
    setp.ne.or.u32 gave_up, stopped, 0, gave_up;"""


def wait(  # noqa: PLR0913 - a wait has as many parts
    find: str,
    word: str,
    came: str,
    stops: Sequence[str],
    limit: str,
    *,
    each: str = "",
    arrived: str = "together",
    never: str = "",
    missed: str = "",
    after: str = "",
) -> str:
    """Return a block that waits; `$0` becomes 1 if all words came, else 0.

    Args:
        find: lines that set `mine` in the threads that have a word.
        word: address of the word, which is read to `seen`.
        came: lines that set the predicate `came`.
        stops: addresses of words that stop the wait if they are not 0.
        limit: timeout in ns.
        each: lines between the read of the clock and the loop, of the threads that have a word.
        arrived: label at which a thread goes on after its word came.
        never: lines that set the predicate `gave_up` if the word says that it will not come.
        missed: lines of a thread that gave up, before it meets the others.
        after: lines of all threads after they met; `gave_up` is the same in all of them.
    """
    hopeless = f"{never}\n    @gave_up bra together;\n    " if never else ""
    return f"""{{
    .reg .pred came, gave_up;
    .reg .b32 seen, stopped, told;
    .reg .b64 begin, now;
    setp.ne.u32 gave_up, 0, 0;
    {find}
    @!mine bra together;
    {clock("begin")}
    {each}
again:
    ld.acquire.sys.global.u32 seen, [{word}];
    {came}
    @came bra {arrived};
    {hopeless}{expired(stops, "begin", limit)}
    @!gave_up bra again;
    {missed}
together:
    {met("gave_up")}
    selp.u32 $0, 0, 1, gave_up;
    {after}
}}"""


def of_first() -> str:
    """Set `mine` in the first thread."""
    return """.reg .pred mine;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 mine, thread, 0;"""


def of_rank(ranks: str, array: str, pitch: str) -> str:
    """Find the thread of each rank in a set: set `mine`, and `at` to its place in an array.

    Args:
        ranks: set of ranks, below 64.
        array: address of the array.
        pitch: bytes of an element.
    """
    return f""".reg .pred mine;
    .reg .b32 thread;
    .reg .b64 at, set;
    mov.u32 thread, %tid.x;
    shr.u64 set, {ranks}, thread;
    and.b64 set, set, 1;
    setp.ne.u64 mine, set, 0;
    setp.lt.and.u32 mine, thread, 64, mine;
    mul.wide.u32 at, thread, {pitch};
    add.u64 at, at, {array};"""


def raised(find: str, word: str, value: str, op: str = "set") -> str:
    """Return a block that raises a word behind a barrier of all threads.

    find: lines that set the predicate `mine` in threads that have a word.
    """
    return f"""{{
    barrier.sync 0;
    {find}
    @mine {release(word, value, op)}
    mov.u32 $0, 0;
}}"""
