"""docs/performance/predictions.md: predicted against measured times, and simulated machines."""

from __future__ import annotations

from tables import foresight, scenarios
from tables.sources import Document, Page, machine_of, whole_page

FIRST = (
    "This page shows how well ficco predicts times, and what it predicts for a machine on which it "
    "has not run. It is for readers who rely on `auto` or `ficco explain` for shapes or machines "
    "that were not measured. Predictions come from the simulator and from the rule, and are "
    "compared with the measurements of the page [Operators](operators.md)."
)


def predictions(page: Page) -> str:
    """Return the text of the page."""
    body: list[str] = []
    for path, document in page.one("predict"):
        profiles = "` and `".join(document["profiles"])
        body += [
            "## Predicted and measured on GPUs", "",
            "Every schedule and grain that was measured is predicted from the profiles "
            f"`{profiles}`. The profiles do not contain the compared shapes: their GEMMs have "
            "other values of m. A choice is *right* if the chosen schedule takes at most 3% longer "
            "than the fastest measured one, or if the difference is not larger than the "
            "interquartile range of either. The last column counts shapes for which the choice is "
            "slower than `serial` by more than 3%.", "",
            *foresight.prediction_table(document), "",
            "Errors are relative to the measured medians. There are no measurements of 8 GPUs, so "
            "predictions for 8 GPUs are not checked.", "",
            f"Predicted on {machine_of(document)}: {page.link(path)}.", "",
        ]  # fmt: skip
    for path, document in page.one("push_sm_predicted"):
        body += [*_sending(document), f"Predicted on {document['date']}: {page.link(path)}.", ""]
    for path, document in page.one("host_predictions"):
        body += [*_on_cpus(document), f"{machine_of(document)}: {page.link(path)}.", ""]
    for path, document in page.one("scenarios"):
        body += [*_simulated(document), f"Simulated on {document['date']}: {page.link(path)}.", ""]
    following = {
        "where_it_ran.md": "Where it ran: hardware, and what was not tested.",
        "../concepts/machines_and_profiles.md": "Machines and profiles.",
    }
    return whole_page("Predictions", FIRST, body, following)


def _sending(document: Document) -> list[str]:
    """Return the section on kernels that send their results."""
    return [
        "## Predicted: kernels that send against the best other schedule", "",
        "Each figure is the time of the best other schedule over that of the faster of `push_sm` "
        "and `whole_sm`, both of the simulator, captured, in bfloat16. n and k are 4096 for the "
        "all-to-all operators, and 8192 over all ranks for the others. The profile of 2 H200s has "
        "all costs measured. Those of 4 and 8 lack some: products that send are assumed to take "
        f"{document['assumed_where_not_measured']['sending_gemm']} times as long as the library's, "
        "and a kernel that reads peers' rows "
        f"{document['assumed_where_not_measured']['pull_us']:g} us. **On 4 and 8 GPUs these "
        "kernels have not run.** What 2 GPUs measured is on the page "
        "[Operators](operators.md#65-to-4096-rows-2-nvidia-h200s).", "",
        *foresight.sending_table(document), "",
        f"From 65 to 4096 rows they are predicted to be {document['gain_65_to_4096_rows']:.2f} "
        "times as fast, in the geometric mean. Up to 64 rows, `gather_sm`, `one_shot_sm` and "
        "`two_shot_sm` are in their place.", "",
    ]  # fmt: skip


def _on_cpus(document: Document) -> list[str]:
    """Return the section on calls of processes on a CPU."""
    load = max(document["load"])
    return [
        "## Predicted and measured on a CPU", "",
        "On a CPU, the first call of a group measures a profile. Here calls of three operators, "
        "five shapes and three schedules are predicted from such profiles:", "",
        *foresight.host_prediction_table(document), "",
        "The last column says by how much `serial` is slower than the fastest of the three "
        f"schedules, at most. Other programs used the machine too (load {load:.1f}). The ranks ran "
        f"at nice {document['nice']}, each pinned to a core, and the fastest of the runs counts. "
        "Ranks that are not pinned may take longer. Copies with cores of their own have not been "
        "measured.", "",
    ]  # fmt: skip


def _simulated(document: Document) -> list[str]:
    """Return the section on the paper's scenarios."""
    lines = [
        "## Simulated: 16 scenarios of the FiCCO paper on 8 MI300X", "",
        "**Nothing in this section ran on hardware.** The profile "
        f"`{document['machine']}` consists of published figures, and "
        "ficco has never run on AMD GPUs. The operator is all-gather + "
        f"matmul in bfloat16, captured, with grain {document['grain']}. "
        "`ficco sweep paper_mi300x --out DIR` simulates the same shapes with all grains. The "
        "assumptions:", "",
        *[f"- {text}" for text in document["assumptions"]], "",
        "Speed-ups over `serial`, geometric means over the scenarios, with the least and the "
        "largest in brackets:", "",
        *scenarios.by_schedule(document), "",
    ]  # fmt: skip
    for part in scenarios.plain(document):
        reading = part["reading"]
        lines += [
            f"### Each scenario, {reading}",
            "",
            *scenarios.by_scenario(document, reading),
            "",
        ]
    return [
        *lines,
        "*Best of the paper* is the fastest of the paper's four schedules. *The rule takes* says "
        "what `auto` would choose, and the last column how much slower that is than the fastest "
        "candidate.", "",
        "### How much the assumptions matter", "",
        "One assumption changes at a time. Speed-ups are over `serial`:", "",
        *scenarios.sensitivity(document), "",
        "*Kernels make the copies* is the profile `mi300x8_blit`: copies stand still while a "
        "GEMM runs, so nothing overlaps. `ficco doctor` says whether a machine's copies are "
        "such; ficco then takes `serial` and refuses gated schedules, whose kernels would wait "
        "for copies that wait for them. `ficco sweep paper_mi300x --simulate mi300x8_blit` "
        "simulates it.", "",
        "### Choices of the rule", "",
        "The simulator's times of the rule's choices, compared with the fastest candidates on the "
        "same profile:", "",
        *scenarios.rule_table(document), "",
    ]  # fmt: skip
