"""What a notebook needs to teach.

check, check_fails       a claim, printed by its bound
see                      the reader's prediction beside what was counted
write_step               the reader's own step, judged on several shapes
exercise                 an answer, judged by the notebook's rule
variant, show_diff       a stage with a change; what changed
scoreboard, race         all stages so far, counted and timed
draw_way_of, draw_explanation, draw_device_verdict
                         the pictures that every notebook has
"""

from __future__ import annotations

from paged_attention.lesson import checkers_copies, checkers_states
from paged_attention.lesson.changes import show_diff, variant
from paged_attention.lesson.claims import check, check_fails
from paged_attention.lesson.exercises import exercise
from paged_attention.lesson.pictures import (
    draw_device_verdict,
    draw_explanation,
    draw_way_of,
)
from paged_attention.lesson.predictions import see
from paged_attention.lesson.progress import shown
from paged_attention.lesson.scoreboard import costs, race, scoreboard, stages_before
from paged_attention.lesson.steps import Function, Misunderstood, tried

SERIES = (
    "paged_kv_cache",
    "naive_loops",
    "batched_gather",
    "single_bmm",
    "gqa_broadcast",
    "single_tile",
    "fused_phase2",
    "grid_even_share",
    "final_kernel",
    "one_decode_step",
    "real_model",
)
CHECKERS = {
    f.__name__: f
    for f in (
        checkers_states.merge_sums,
        checkers_copies.gather_values,
        checkers_copies.pad_partitions,
        checkers_copies.group_logits,
        checkers_copies.one_tile,
        checkers_states.merge_as_product,
        checkers_states.wave_update,
    )
}


def write_step(name: str, function: Function) -> None:
    """Try the reader's step on several shapes, and print in a sentence what became of it.

    Args:    name: one of CHECKERS, whose docstring says what the function is given and returns
             function: the reader's, which returns None as long as nothing is written
    Raises:  KeyError: no checker of that name

    Example:
        >>> write_step("group_logits", lambda q, k: None)
        group_logits: not tried yet
    """
    print(f"{name}: {tried(CHECKERS[name], function)}")


__all__ = [
    "CHECKERS",
    "Misunderstood",
    "SERIES",
    "check",
    "check_fails",
    "costs",
    "draw_device_verdict",
    "draw_explanation",
    "draw_way_of",
    "exercise",
    "race",
    "scoreboard",
    "see",
    "show_diff",
    "shown",
    "stages_before",
    "variant",
    "write_step",
]
