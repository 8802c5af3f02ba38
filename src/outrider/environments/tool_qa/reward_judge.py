"""A judge in the reward: right or wrong is what a model behind an endpoint says of the answer.

Source: ARPO (arXiv 2507.19849), section 4.1, and RAPO (arXiv 2603.03078) score open answers by a judge; the
verdict is that of :mod:`outrider.environments.tool_qa.judge`.
"""

import hashlib
from typing import Final

from pydantic import Field

from outrider.engines.chat.engine import EndpointSettings
from outrider.environments.tool_qa.judge import Judge, JudgeSettings, discover_judge
from outrider.errors import ConfigError, EngineFault, ModelError, ToolFault, ToolUnavailable
from outrider.tools.once import SingleFlightCache
from outrider.types import Task

_CACHE_SIZE: Final = 65_536


class RewardJudgeEndpoint(EndpointSettings):
    """The judge's chat server. Less patience than elsewhere: it answers within an episode's last step."""

    timeout_s: float = Field(20.0, gt=0)
    max_retries: int = Field(1, ge=0)


class RewardJudgeSettings(JudgeSettings):
    """The judge of the reward ``judge``: its endpoint and how it is asked."""

    endpoint: RewardJudgeEndpoint


class RewardJudge:
    """Verdicts on answers, for all episodes of a run; safe to use from several threads.

    Every answer to a task is asked about once, so that equal answers get equal rewards, whatever the server
    draws.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._verdicts: SingleFlightCache[bool] = SingleFlightCache(_CACHE_SIZE)

    def is_correct(self, task: Task, prediction: str) -> bool:
        """The verdict on one answer. Raises ToolFault where there is none: it is never counted as wrong."""
        accepted = "\n".join((task.question, *task.answers))
        return self._verdicts.get(
            (task.key, accepted, prediction), lambda: self._judge_answer(task, prediction)
        )

    def _judge_answer(self, task: Task, prediction: str) -> bool:
        # what is asked names the random stream, and not who asks first
        digest = hashlib.sha256(prediction.encode("utf-8", "surrogatepass")).hexdigest()
        try:
            judgement = self._judge.judge(task.question, task.answers, prediction, key=f"{task.key}/{digest}")
        except ModelError as error:
            raise ToolFault(f"the reward's judge: {error}") from error
        if judgement.is_correct is None:
            raise ToolFault(f"the reward's judge: {judgement.fault}")
        return judgement.is_correct


def make_reward_judge(settings: RewardJudgeSettings | None) -> RewardJudge | None:
    """The judge that a reward names; raises ToolUnavailable where its server does not answer."""
    if settings is None:
        return None
    try:
        return RewardJudge(discover_judge(settings))
    except (EngineFault, ModelError, ConfigError) as error:
        raise ToolUnavailable(f"the reward's judge: {error}") from error
