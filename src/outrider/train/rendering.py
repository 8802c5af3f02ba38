"""The renderer that a run's settings mean, tried out before the first rollout."""

from collections.abc import Callable

from outrider.environments.base import EnvironmentSettings
from outrider.environments.families import observation_roles
from outrider.tokens import ChatRenderer, Tokenizer
from outrider.tokens.load_check import check_template
from outrider.train.settings import ModelSettings


def make_renderer(
    tokenizer: Tokenizer, model: ModelSettings, environment: EnvironmentSettings | None
) -> ChatRenderer:
    """For the episodes of an environment; None: for one question and one answer. Raises ModelError for a chat
    template that lacks what its episodes need.
    """
    return ChatRenderer(
        tokenizer,
        template_kwargs=model.template_kwargs,
        call_format=None if environment is None else environment.call_format,
        observations=() if environment is None else observation_roles(environment),
        history_thinking=model.history_thinking,
    )


def make_checked_renderer(
    tokenizer: Tokenizer,
    model: ModelSettings,
    environment: EnvironmentSettings,
    *,
    note: Callable[[str], None],
) -> ChatRenderer:
    """The same, with every role and order of the episodes tried, and what a person should know told.

    Raises ModelError with the template's name and the role for what cannot be rendered.
    """
    renderer = make_renderer(tokenizer, model, environment)
    report = check_template(renderer, observation_roles(environment))
    if not renderer.supports_system:
        note("the chat template has no system message: a prompt's goes in front of its first user message")
    for line in report.notes():
        note(line)
    return renderer
