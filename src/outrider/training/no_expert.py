"""Questions of one's own have no expert: what needs one is refused at once, with the ways out."""

from outrider.errors import ConfigError
from outrider.training.settings import RunSettings

_FILE = "a file of trajectories (docs/formats.md)"


def require_experts(settings: RunSettings) -> None:
    """Raises ConfigError for a cold start, or a buffer to be filled, without the experts that it needs."""
    if settings.environment.has_experts:
        return
    kind = settings.environment.type
    why = (
        f"{'questions of your own' if kind == 'tools' else 'its tasks'} "
        f"(environment.type = {kind}) have no expert"
    )
    if settings.cold_start.num_examples and settings.cold_start.demonstrations is None:
        raise ConfigError(
            f"cold_start.num_examples = {settings.cold_start.num_examples}, and {why}: name {_FILE} with "
            "cold_start.demonstrations, or begin without a cold start (cold_start.num_examples=0)"
        )
    if settings.algorithm.retrieves and settings.train.num_steps > 0 and settings.buffer.path is None:
        raise ConfigError(
            f"algorithm.type = {settings.algorithm.type} retrieves from a buffer, and {why} to fill one: "
            f"make it from {_FILE} with `outrider buffer "
            "import FILE --out steps.sqlite`, or from an agent with `outrider buffer build RECIPE --endpoint "
            "URL --out steps.sqlite`, and set buffer.path=steps.sqlite; "
            "or train without retrieval (algorithm.num_hybrid=0)"
        )
