"""Checks of the order in a kernel's PTX: signals after data, loads after signals and fences.

Each takes the text and its variant, and fails by an assertion that says what is out of order.
"""

from __future__ import annotations

import re

from ficco.kernels.variants import Variant

BULK_LOAD = r"cp\.async\.bulk\.tensor\.2d\.shared::cluster\.global"
ACQUIRE = r"ld\.acquire\.sys\.global"
RELEASE = r"st\.release\.sys\.global"
MET = r"barrier\.red\.or\.pred"
FENCE = r"fence\.proxy\.async\.global"
COUNT = r"atom\.add\.acq_rel\.gpu\.global"
SENT_COUNT = r"atom\.global\.sys\.acq_rel\.add"
STORE = r"st\.global\."
LOAD = r"ld\.global|cp\.async\.c"


def _places(pattern: str, text: str) -> list[int]:
    return [found.start() for found in re.finditer(pattern, text)]


def _check_no_bulk_stores(text: str) -> None:
    bulk = _places(r"cp\.async\.bulk", text)
    assert len(bulk) == len(_places(BULK_LOAD, text)), "bulk stores are not ordered before words"


def _check_gated(text: str, variant: Variant) -> None:
    constants = dict(variant.constants)
    acquired, met = _places(ACQUIRE, text), _places(MET, text)
    assert acquired, "nothing is awaited"
    loads = _places(LOAD, text)
    for at in acquired:  # all threads meet after the one that reads the signal
        ends = [*[each for each in loads if each > at][:1], len(text)]
        assert any(at < each < ends[0] for each in met), "a thread goes on before the word"
    _check_no_bulk_stores(text)
    if constants["WINDOW_BULK"]:
        loads, fenced = _places(BULK_LOAD, text), _places(FENCE, text)
        behind = [load for load in loads if load > acquired[0]]
        assert behind, "no bulk loads behind a wait"
        assert fenced, "bulk loads of a part before its fence"
        if constants["OWN_BULK"]:
            assert len(loads) > len(behind), "own tiles before the wait, others behind it"
        for load in behind:
            last = [max([at for at in each if at < load], default=-1)
                    for each in (acquired, met, fenced)]  # fmt: skip
            assert last == sorted(last) and last[0] >= 0, "bulk loads of a part before its fence"
    else:
        assert not _places(FENCE, text), "a fence without bulk loads"
        assert max(_places(LOAD, text)) > max(acquired), "nothing is loaded behind a wait"
    ended, raised = _places(r"atom\.(\w+\.)*acq_rel", text), _places(RELEASE, text)
    assert ended and raised, "the window is not given back"
    stored = max(_places(STORE, text))
    assert ended[-1] < stored < raised[-1], "the window is given back before it is cleared"
    assert max([*_places(BULK_LOAD, text), *_places(LOAD, text[: ended[-1]])]) < ended[-1], (
        "the window is given back before it is read"
    )
    assert _places(r"red\.relaxed\.sys\.global\.max", text), "nobody tells who gave up"


def _check_raised(text: str) -> None:
    """Each signal is set after the stores of its rows and after a barrier of all threads."""
    stores, counts, releases = (_places(what, text) for what in (STORE, COUNT, RELEASE))
    assert counts and len(counts) == len(releases), "a count without a word"
    begin = 0
    for counted, released in zip(counts, releases, strict=True):
        mine = [store for store in stores if begin < store < counted]
        met = max([at for at in _places(r"bar\.sync", text) if at < counted], default=-1)
        assert mine and max(mine) < met < counted < released, "a word before its rows"
        begin = released
    assert max(stores) < max(releases), "rows that no word tells of"


def _check_pushing(text: str, variant: Variant) -> None:
    _check_no_bulk_stores(text)
    _check_raised(text)


def _check_summing(text: str, variant: Variant) -> None:
    constants = dict(variant.constants)
    acquired, met, terms = _places(ACQUIRE, text), _places(MET, text), constants["TERMS"]
    # Each may occur more than once: for a product without depth, and for the last tile.
    assert acquired and len(acquired) == len(met), "a wait for each term"
    assert len(acquired) % terms == 0, "a wait for each term"
    for i in range(0, len(acquired), terms):
        stored = next(at for at in _places(STORE, text) if at > met[i + terms - 1])
        arrived = [at for at in _places(r"ld\.global\.v[24]", text) if acquired[i] < at < stored]
        assert arrived and max(met[i : i + terms]) < min(arrived), (
            "terms are read before their word"
        )
    assert not _places(r"ld\.global\S*\.nc", text), "terms are read past the acquire"
    _check_no_bulk_stores(text)
    _check_raised(text)


def _check_one_kernel(text: str, variant: Variant) -> None:
    constants = dict(variant.constants)
    waited = _places(r"griddepcontrol\.wait", text)
    assert len(waited) == constants["CHAINED"], "it does not await the launch before it"
    assert "griddepcontrol.launch_dependents" not in text, "the next one begins too early"
    if waited:
        first = _places(r"(ld|st|atom|red)\.\S*global", text)[0]
        assert waited[0] < first, "it begins too early"
    assert len(_places(RELEASE, text)) == 1, "a word beside the one that says entered"
    drawn = _places(r"atom\.relaxed\.gpu\.global\.add", text)
    assert len(drawn) == 1, "threads may read the number later"
    elements = constants["SUM_ROWS"] * constants["SUM_COLS"] // (32 * variant.warps)
    bits = 32 if "fp32" in variant.types[0] else 16
    width = {16: "b16", 32: "b32", 64: r"v2\.b32"}.get(elements * bits, r"v4\.b32")
    looks = [at for at in _places(rf"ld\.volatile\.global\.{width}", text) if at > drawn[0]]
    least = constants["WORLD"] + constants["TWICE"]
    assert len(looks) >= least, "boxes are read by few bytes, or cached"
    if width == "b32":  # loads of counts have the same width
        looks = looks[: constants["WORLD"]]
    # All threads have read their boxes before any thread resets one.
    for begin, end in zip(looks, [*looks[1:], len(text)], strict=True):
        first_store = _places(rf"st\.global\.{width}", text[begin:end])
        assert not first_store or "barrier.red" in text[begin : begin + first_store[0]], (
            "a box is vacated before all threads have seen it"
        )
    asked = min(_places(ACQUIRE, text))
    assert _places(rf"st\.global\.{width}", text[:asked]), "nothing is sent before a wait"
    assert not _places(r"ld\.global\S*\.nc", text), "what peers stored is read from a cache"


def _check_gather(text: str, variant: Variant) -> None:
    constants = dict(variant.constants)
    releases, acquires = _places(RELEASE, text), _places(ACQUIRE, text)
    assert len(releases) == 3, f"{len(releases)} raises: enter, the own slices, free"
    assert len(acquires) == 4, f"{len(acquires)} waits: free, the gate, entered, all slices"
    for at in releases:  # all threads meet between their stores and a signal
        between = text[max(_places(r"st\.global|st\.release", text[:at]), default=0) : at]
        assert "barrier.sync" in between, "a word before what it tells of is stored"
    ends = [*acquires[1:], len(text)]
    for at, end in zip(acquires, ends, strict=True):
        behind = _places(r"ld\.global|cp\.async|st\.global", text[at:end])
        met = _places(r"barrier\.red", text[at:end])
        assert not behind or (met and met[0] < behind[0]), "a thread goes on before the word"
    assert not _places(r"ld\.global\S*\.nc", text), "what peers stored is read past a word"
    asked = _places(r"prefetch\.global\.L2", text)
    assert asked and asked[0] < acquires[0], "weights are asked for late"
    assert _places(r"atom\.global\.gpu\.acq_rel\.add", text), "ends are not ordered"
    if constants["ROWS"] > 1 and constants["EDGE"] == 8:
        assert _places(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", text), (
            "rows are loaded by fewer than 16 bytes"
        )


def _check_sending(text: str, variant: Variant) -> None:
    constants = dict(variant.constants)
    shares, gathers = constants["FINISH"] == 3, constants["FINISH"] == 0
    counts = _places(SENT_COUNT, text)
    releases, stores = _places(RELEASE, text), _places(STORE, text)
    assert len(counts) == 1 + shares, f"{len(counts)} counts of what is stored at peers"
    # The compiler may join the raises behind the counts.
    assert 2 < len(releases) <= 2 + len(counts), "raises: enter, free, and behind each count"
    for counted in counts:  # stores, all threads meet, the count, the signal
        stored = max([at for at in stores if at < counted], default=-1)
        met = _places(r"bar\.sync|barrier\.sync", text[max(stored, 0) : counted])
        assert stored >= 0 and met, "what is stored is counted too early"
        assert counted < max(releases[:-1]), "a count without a word"
    for at in releases:  # all threads meet between what they stored and a signal
        between = text[max(_places(r"st\.global|st\.release", text[:at]), default=0) : at]
        assert "barrier.sync" in between, "a word before what it tells of is stored"
    acquires = _places(ACQUIRE, text)
    for at, end in zip(acquires, [*acquires[1:], len(text)], strict=True):
        behind = _places(rf"{LOAD}|{BULK_LOAD}|{STORE}", text[at:end])
        met = _places(MET, text[at:end])
        assert not behind or (met and met[0] < behind[0]), "a thread goes on before the word"
    assert not _places(r"ld\.global\S*\.nc", text), "what peers stored is read past a word"
    _check_no_bulk_stores(text)
    fenced = _places(FENCE, text)
    assert len(fenced) == (gathers and constants["WINDOW_BULK"]), "fences of bulk loads"
    if fenced:
        first = min([at for at in _places(BULK_LOAD, text) if at > fenced[0]], default=-1)
        assert max([at for at in acquires if at < fenced[0]]) < fenced[0] < first, (
            "bulk loads of rows before their fence"
        )


CHECKS = {
    "gated_gemm": _check_gated, "pushing_gemm": _check_pushing, "summing_gemm": _check_summing,
    "one_kernel_all_reduce_gemm": _check_one_kernel, "one_kernel_gather_gemm": _check_gather,
    "sending_gemm": _check_sending,
}  # fmt: skip
