"""``outrider push``: a run's weights with a model card as a repository of the Hugging Face hub."""

import tempfile
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of whichever client it has

from outrider import __version__
from outrider.train.export import export_run, find_checkpoint
from outrider.train.hub.card import Base, add_license, find_base, model_card
from outrider.train.hub.uploading import CARD, Pushed, hub, list_files, require_target, upload
from outrider.train.state.checkpoint import checkpoint_step
from outrider.train.state.recorded import RECORD, recorded_settings
from outrider.watch.run_directory import read_run


def push_run(
    run: Path, repo: str, *, step: int | None = None, private: bool = False, dry_run: bool = False
) -> Pushed:
    """Export the newest checkpoint (or that of ``step``), write its card, and upload both. The address is
    ``$HF_ENDPOINT``, the token that of the login or of ``$HF_TOKEN``.

    Raises :class:`ConfigError` for a name that no repository can have and for ``private`` where there is a
    public one, :class:`CheckpointError` as
    :func:`~outrider.train.export.export_run` does, and :class:`HubError` where the hub fails; the same call
    then goes on, and sends no file again that has arrived.
    """
    checkpoint = find_checkpoint(run, step)
    require_target(repo, dry_run=dry_run)
    api = hub()
    settings = recorded_settings(run / RECORD)
    base = find_base(settings.model.name)
    if base.name and not base.license:
        base = _with_license(api, base)
    with tempfile.TemporaryDirectory(prefix="outrider-push-") as scratch:
        folder = Path(scratch) / "model"
        export_run(run, folder, checkpoint=checkpoint)
        template = folder / "chat_template.jinja"
        card = model_card(
            repo, settings, read_run(run), step=checkpoint_step(checkpoint), base=base,
            template=template.read_text(encoding="utf-8") if template.is_file() else "",
        )  # fmt: skip
        (folder / CARD).write_text(card, encoding="utf-8")
        files = list_files(folder)
        if dry_run:
            return Pushed(card=card, files=files)
        message = f"Outrider {__version__}: step {checkpoint_step(checkpoint)}"
        url = upload(api, folder, repo, kind="model", private=private, message=message)
    return Pushed(card=card, files=files, url=url)


def _with_license(api: HfApi, base: Base) -> Base:
    """What the hub says of the base; a hub that does not know it, or is not there, says nothing."""
    try:
        info = api.model_info(base.name)
    except (HTTPError, OSError, ValueError):
        return base
    return add_license(base, info.card_data.get("license") if info.card_data else None)
