"""Checkpoints: written by orbax in the background, whole or not at all, the newest few kept."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from .step import TrainState

FOLDER = "checkpoints"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; says where, and which one is the last that is whole."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a checkpoint says about its run, besides the state."""

    step: int
    seconds: float  # of training so far, over all starts
    skipped: int  # steps left out since their loss or gradient was not finite
    skipped_in_a_row: int = 0  # of these the last, up to this step; checkpoints of earlier versions do not say


class Checkpoints:
    """The checkpoints of a run's folder.

    Orbax writes into a folder under another name, renames it once all of it is there, and only then removes the oldest:
    a process that is killed, or a disk that is full, leaves the one before.
    """

    def __init__(self, run_dir: Path, *, keep: int, read_only: bool = False):
        self._folder = (run_dir / FOLDER).absolute()
        # Folders are made before save returns: in the background, one that cannot be made leaves the other threads
        # waiting for it for minutes (orbax 0.12.8).
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=not read_only,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        )
        try:
            if not read_only:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be kept in {self._folder}: {error}") from error

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, progress: Progress) -> None:
        """Starts to write, once the one before is written; returns when the state is copied and may be donated.

        Raises:
          CheckpointError: this one cannot be started, or the one before could not be finished.
        """
        if progress.step == self.latest():
            return
        items = {name: ocp.args.StandardSave(part) for name, part in _parts(state).items()}
        args = ocp.args.Composite(**items, progress=ocp.args.JsonSave(dataclasses.asdict(progress)))
        try:
            self._manager.save(progress.step, args=args)
        except Exception as error:  # What the file system says comes through several libraries, as many types.
            what = f"checkpoint of step {progress.step}, or the one before, cannot be written"
            raise self._explain(what, error) from error

    def check(self) -> None:
        """Says at once if what is being written has failed; waits for nothing.

        Raises:
          CheckpointError: it has.
        """
        try:
            self._manager.check_for_errors()
        except Exception as error:  # As in save.
            raise self._explain("a checkpoint could not be finished", error) from error

    def wait(self) -> None:
        """Returns when what was started is on disk.

        Raises:
          CheckpointError: it could not be finished.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # As in save.
            raise self._explain("a checkpoint could not be finished", error) from error

    def last_whole(self) -> tuple[int | None, CheckpointError | None]:
        """Step of the newest on disk, once what was started is there, and why it is not if it has failed."""
        try:
            self.wait()
        except CheckpointError as error:
            return self.latest(), error
        return self.latest(), None

    def restore(self, like: TrainState) -> tuple[TrainState, Progress]:
        """The newest state, of the shapes and where ``like`` says; it may have been written on another mesh.

        Raises:
          CheckpointError: there is none, or it does not fit.
        """
        step = self._require_latest()
        items = {name: ocp.args.StandardRestore(part) for name, part in _parts(like).items()}
        args = ocp.args.Composite(**items, progress=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=args)
        except Exception as error:  # As in save.
            raise self._unreadable(step, error) from error
        state = TrainState(restored["params"], restored["opt_state"], restored["ema"] if like.ema is not None else None)
        return state, Progress(**restored["progress"])

    def restore_params(self, like: Any, *, ema: bool) -> tuple[Any, int]:
        """The newest parameters, or their moving average, and their step."""
        step = self._require_latest()
        name = "ema" if ema else "params"
        try:
            args = ocp.args.Composite(**{name: ocp.args.StandardRestore(like)})
            return self._manager.restore(step, args=args)[name], step
        except Exception as error:  # As in save.
            raise self._unreadable(step, error) from error

    def close(self) -> None:
        """Frees the writer's threads; what was started is finished first, and an error of it is not raised."""
        with contextlib.suppress(Exception):  # As in save; check, wait or the next save have raised it, or will not.
            self._manager.close()

    def _require_latest(self) -> int:
        if (step := self.latest()) is None:
            raise CheckpointError(f"there is no whole checkpoint in {self._folder}")
        return step

    def _explain(self, what: str, error: Exception) -> CheckpointError:
        """The message that a user reads."""
        self._manager.reload()
        last = self.latest()
        kept = "there is none before it" if last is None else f"that of step {last} is whole"
        return CheckpointError(f"{what} in {self._folder}: {_one_line(error)}; {kept}")

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        """The same for one that is there."""
        others = [other for other in self._manager.all_steps() if other != step]
        return CheckpointError(
            f"checkpoint {self._folder / str(step)} cannot be read: {_one_line(error)}; "
            f"others: {others or 'none'}, which are used if that folder is removed"
        )


def _one_line(error: Exception) -> str:
    """An error of another library, cut to what fits into a message."""
    text = " ".join(str(error).split())
    # The reason is at the end, after the names of files.
    text = text if len(text) < 300 else f"{text[:100]} ... {text[-180:]}"
    return f"{type(error).__name__}: {text}"


def _parts(state: TrainState) -> dict[str, Any]:
    """The items of a checkpoint; there is no moving average where none is kept."""
    return {name: part for name, part in state._asdict().items() if part is not None}
