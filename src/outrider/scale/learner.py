"""The learner of a run with several trainer ranks; rollouts are played in this process, with a copy of the
weights.
"""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch

from outrider.algorithms.algorithm import Algorithm
from outrider.engines.local.model import LanguageModel, load_model, resolve_model, resolve_precision
from outrider.errors import CheckpointError, ConfigError
from outrider.scale.group import RankGroup
from outrider.scale.rank import RankSettings
from outrider.scale.resources import Resources
from outrider.scale.session import Session
from outrider.scale.sharding import require_shardable
from outrider.trace import Trace
from outrider.train.learner import OnStep
from outrider.train.settings import RunSettings
from outrider.train.state.checkpoint import require_intact
from outrider.train.state.checkpoint_state import file_checksum
from outrider.train.update.adapters import choose_trained
from outrider.train.update.pack import RolloutPath
from outrider.train.update.policy import export
from outrider.train.update.update import UpdateReport
from outrider.train.update.weight_files import tensor_files

_PIECE_BYTES: Final = 256 * 2**20  # of weights that are on their way at a time


class ShardedLearner:
    """Calls every rank; :attr:`language_model` gets the weights after whatever moves them."""

    def __init__(self, settings: RunSettings, *, initial: bool) -> None:
        self.num_steps = 0
        self.learning_rate = 0.0
        self.has_reference = settings.algorithm.needs_reference
        self.language_model, self.trained = _load_copy(settings)
        require_shardable(str(_folder(settings)))
        self._weights = settings.cluster.weights if settings.cluster.sends_directly else None
        self._connected_actors: list[Any] = []
        self._is_stale = False
        self.session = Session(settings.cluster)
        try:
            self._group = RankGroup(
                self.session, _rank_settings(settings, initial=initial), size=settings.cluster.num_trainers
            )
            self.placement_group = self._group.placement_group
            self._pieces = _pieces(self._group.call("sizes")[0])
            if initial and settings.model.initial_checkpoint is not None:
                self._mark_stale()
        except BaseException:
            self.session.close()
            raise

    def update(
        self,
        traces: Sequence[Trace],
        algorithm: Algorithm,
        *,
        on_batch: Callable[[int], None],
        version: int | None = None,
        probes: Sequence[Trace] = (),
    ) -> UpdateReport:
        """See :class:`outrider.train.learner.Learner`."""
        [first, *_] = self._group.call(
            "update", list(traces), algorithm.objective, _own_loss(algorithm), version, list(probes)
        )
        report: UpdateReport
        num_steps_before = self.num_steps
        report, self.num_steps, self.learning_rate = first
        on_batch(report.num_scored_tokens)
        if self.num_steps != num_steps_before:  # without a signal there is no step, and nothing to gather
            self._mark_stale()
        return report

    def score(self, traces: Sequence[Trace]) -> None:
        """See :class:`outrider.train.learner.Learner`."""
        [node_values, *_] = self._group.call("score", list(traces))
        for trace, values in zip(traces, node_values, strict=True):
            for node, kl in zip(trace.nodes, values, strict=True):
                node.kl = kl

    def fit(self, paths: Sequence[RolloutPath], *, on_step: OnStep) -> None:
        """See :class:`outrider.train.learner.Learner`. What the steps tell comes at the end."""
        [steps, *_] = self._group.call("fit", list(paths))
        self._mark_stale()
        for done, total, values in steps:
            on_step(done, total, values)

    def save(self, folder: Path) -> None:
        """See :class:`outrider.train.learner.Learner`."""
        self._group.call("save", str(folder))

    def load(self, folder: Path, *, num_steps: int) -> None:
        """See :class:`outrider.train.learner.Learner`."""
        [(self.num_steps, self.learning_rate), *_] = self._group.call("load", str(folder), num_steps)
        self._mark_stale()

    def freeze_reference(self, path: Path) -> int:
        """See :class:`outrider.train.learner.Learner`."""
        self._group.call("freeze_reference", str(path))
        return file_checksum(path)

    def load_reference(self, path: Path, *, checksum: int | None) -> None:
        """See :class:`outrider.train.learner.Learner`."""
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: it holds the weights that the KL term refers to; put it back"
            )
        if checksum is not None and file_checksum(path) != checksum:
            raise CheckpointError(
                f"reference weights {path} are damaged: the contents are not what was written"
            )
        self._group.call("load_reference", str(path.parent))

    def export(self, folder: Path) -> None:
        """See :class:`outrider.train.learner.Learner`."""
        if self._is_stale:
            self._sync()
        export(self.language_model, folder, check=False)

    def close(self) -> None:
        """See :class:`outrider.train.learner.Learner`."""
        self._group.close()
        self.session.close()

    def send(self, version: int, actors: Sequence[Any], *, is_again: bool = False) -> tuple[int, int]:
        """The weights from the ranks' GPUs to engine processes; bytes of one copy, and calls of one engine.
        ``is_again``: those that were sent last. Raises ClusterFault where that is not done in time, or they
        have moved since.
        """
        if self._connected_actors != list(actors):
            [address, *_] = self._group.call("free_address")
            self._group.call("meet", list(actors), self._weights, address)
            self._connected_actors = list(actors)
        sizes: tuple[int, int] = self._group.call("send", version, is_again)[0]
        return sizes

    def _mark_stale(self) -> None:
        """The copy here follows the ranks; where nobody plays with it, once it is asked for."""
        self._is_stale = True
        if self._weights is None:
            self._sync()

    @torch.no_grad()
    def _sync(self) -> None:
        """The weights of all ranks into the copy that rollouts are played with, a piece at a time."""
        self._is_stale = False
        own = dict(self.language_model.model.named_parameters())
        for names in self._pieces:
            for name, whole in self._group.call("weights", names)[0].items():
                own[name].copy_(whole)


def _load_copy(settings: RunSettings) -> tuple[LanguageModel, frozenset[str]]:
    """The copy that rollouts are played with, and the names of what trains in it."""
    model_settings = settings.model
    model = load_model(
        model_settings.name, precision=_precision(settings), device="cpu", forward=model_settings.forward
    )
    if model.unpacked is not None:
        raise ConfigError(
            f"cluster.num_trainers = {settings.cluster.num_trainers} needs a model that runs packed; "
            f"{model_settings.name!r} does not, because {model.unpacked.why}: set cluster.num_trainers = 1"
        )
    choose_trained(
        model.model,
        lora=model_settings.lora,
        trained_layers=model_settings.trained_layers,
        seed=settings.seed,
    )
    trained = frozenset(name for name, parameter in model.model.named_parameters() if parameter.requires_grad)
    model.model.requires_grad_(False)
    return model, trained


def _folder(settings: RunSettings) -> Path:
    """Where the model's files are."""
    folder = Path(resolve_model(settings.model.name)).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(settings.model.name, local_files_only=True))
    return folder.resolve()


def _rank_settings(settings: RunSettings, *, initial: bool) -> RankSettings:
    checkpoint = settings.model.initial_checkpoint if initial else None
    if checkpoint is not None:
        for name in tensor_files(Path(checkpoint)):
            require_intact(Path(checkpoint), name)
    return RankSettings(
        folder=str(_folder(settings)),
        precision=_precision(settings),
        lora=settings.model.lora,
        trained_layers=settings.model.trained_layers,
        initial=None if checkpoint is None else str(Path(checkpoint).resolve()),
        has_reference=settings.algorithm.needs_reference,
        optimizer=settings.optimizer,
        update=settings.update,
        cold_start=settings.cold_start,
        seed=settings.seed,
        num_threads=settings.num_threads,
        timeout_s=settings.cluster.update_timeout_s,
        resources=Resources.from_settings(settings),
    )


def _precision(settings: RunSettings) -> Literal["bfloat16", "float32"]:
    """The same for all processes. Raises ConfigError where this one cannot tell for theirs."""
    model = settings.model
    if model.precision == "auto" and model.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError('model.precision = "auto": no GPU is seen here; set "bfloat16" or "float32"')
    return resolve_precision(model.precision, model.device)


def _pieces(sizes: dict[str, int]) -> list[list[str]]:
    """Names in order, in pieces of about as many bytes as may be on their way at a time."""
    pieces: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not pieces or size > room:
            pieces.append([])
            room = _PIECE_BYTES
        pieces[-1].append(name)
        room -= size
    return pieces


def _own_loss(algorithm: Algorithm) -> Any:
    """None where the objective has the loss, which every algorithm of this package leaves to it. Raises
    ConfigError for one whose object cannot be sent.
    """
    if type(algorithm).token_loss is Algorithm.token_loss:
        return None
    try:
        pickle.dumps(algorithm.token_loss)
    except Exception as error:
        raise ConfigError(
            f"{type(algorithm).__name__}.token_loss cannot be sent to other processes: "
            "put it on the settings of the algorithm, or train with cluster.num_trainers = 1"
        ) from error
    return algorithm.token_loss
