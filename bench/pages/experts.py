"""docs/performance/experts.md: mixtures of experts. There is no page without results."""

from __future__ import annotations

from naming import where
from tables import experts as tables
from tables.sources import Document, Page, machines, whole_page

from pages.words import NO_MULTICAST, REGIMES

FIRST = (
    "This page shows how long a mixture of experts takes with `ficco.moe` and with PyTorch's "
    "collectives, with experts on all ranks. It is for readers who train or serve such models. "
    "Widths and the experts of a token are those of released models, in bfloat16. A GPU has 4 "
    "experts of Mixtral, 64 of Qwen3-30B, 16 of Qwen3-235B and 16 of DeepSeek-V3; the last two "
    "models have more experts than two such GPUs hold. A figure is the median of interleaved "
    "rounds, in microseconds per call of the slowest rank. Eight routings, and the weights "
    "of several layers, are used in turn. Where no capacity was given, a new routing made the host "
    "prepare its calls again; these figures do not include that. Since then capacities are rounded "
    "up, so that calls share what is prepared. This form is not measured."
)
WAYS = (
    "- *`ficco.moe`* reads the number of rows on the host where it needs it. *With a capacity* the "
    "host does not wait. Pairs of schedules are those of its two operators, with a "
    "capacity.",
    "- *NCCL all-to-all* sends slots, after the host has read how many; PyTorch permutes rows.",
    "- *NCCL all-gather* sends all tokens to all ranks, and adds up results by a reduce-scatter.",
    "- *Symmetric memory* is PyTorch's: each rank stores rows at its peers. Forward only.",
    "- *GEMMs alone* are both `torch._grouped_mm`, on rows that are permuted already. The *floor* "
    "adds the activation and the local sum. Both make no transfer, and are no way to run a layer. "
    "`ficco.moe` may be faster, because its GEMMs are its own.",
    "- *Imbalance* is the rows of the busiest rank over the mean; then the same of experts.",
    "- In *eager* calls the host also waits where a way reads a number of rows.",
)
GAINS = (
    "Speed-ups of `ficco.moe`, the faster of its two ways, over the fastest other way: geometric "
    "means, the least, and the number of points at which ficco is slower. Below 1 ficco is slower."
)
PREDICTED = (
    "Microseconds of ficco's calls by the simulator, captured, for uniform routing, without "
    "`route` and the activation. They were written before the measurement, in the "
    "same run. For 4 and 8 ranks nothing was measured."
)


def experts(page: Page) -> str:
    """Return the text of the page; empty if there are no results."""
    found = [(path, document) for path, document in page.every("moe") if document["points"]]
    if not found:
        return ""
    body = [*WAYS, "", REGIMES, "", NO_MULTICAST, ""]
    for path, document in found:
        body += [f"## {where(document)}", "", *_measured(document)]
        body += [*machines([(path, document)], page), f"- Commit `{document['commit'][:8]}`.", ""]
    newest = max(found, key=lambda each: each[1]["date"])[1]
    if newest["predicted"]:
        body += ["## Predictions", "", PREDICTED, "", *tables.predicted_table(newest), ""]
    following = {
        "operators.md": "Operators: the calls with one weight per rank.",
        "predictions.md": "Predictions: how well the simulator predicts.",
    }
    return whole_page("Mixtures of experts", FIRST, body, following)


def _measured(document: Document) -> list[str]:
    """Return the tables of a result."""
    body = [GAINS, "", *tables.gains(document), ""]
    for section in tables.sections(document):
        kind, regime, routing = section
        title = f"### {tables.KINDS[kind]}, {regime}, {routing} routing"
        body += [title, "", *tables.points_table(document, section), ""]
    if without := tables.reasons(document):
        body += ["Without figures:", "", *without, ""]
    if left := document["left_out"]:
        body += ["The time was over before these points (pass, layer, tokens, routing):", ""]
        body += [*(f"- {point}" for point in left), ""]
    return body
