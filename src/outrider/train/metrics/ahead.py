"""Work that a training run has still to do, counted from its settings and where it is: for the time that is
left.
"""

import math

from outrider.train.settings import RunSettings
from outrider.watch.run_pace import RemainingWork


def remaining_work(
    settings: RunSettings,
    *,
    step: int,
    saved_step: int,
    num_policy_tokens: int,
    is_evaluated: bool,
    ends_evaluated: bool,
) -> RemainingWork:
    """``saved_step``: of the newest checkpoint. ``is_evaluated``: whether the evaluation of this step, where
    there is one, is on file; ``ends_evaluated``: whether the last one is, or there is none.

    A token budget is taken to last as long as the steps so far say.
    """
    end = _last_step(settings, step, num_policy_tokens)
    every, saves = settings.evaluation.every, settings.train.checkpoint_every
    between = 0
    if every:
        last = min(end, settings.train.num_steps - 1)  # the evaluation of the last step is the one at the end
        between = max(0, last // every - step // every) + (
            0 < step <= last and step % every == 0 and not is_evaluated
        )
    regular = end // saves - step // saves + (step > saved_step and step % saves == 0)
    final = end > saved_step and end % saves != 0
    return RemainingWork(
        step=end - step,
        evaluation=between + (end > 0 and not ends_evaluated),
        checkpoint=regular + final,
    )


def _last_step(settings: RunSettings, step: int, num_policy_tokens: int) -> int:
    budget, last_step = settings.train.max_policy_tokens, max(step, settings.train.num_steps)
    if budget is None or not step or not num_policy_tokens:
        return last_step
    return min(last_step, step + max(0, math.ceil((budget - num_policy_tokens) * step / num_policy_tokens)))
