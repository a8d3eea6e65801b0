"""Mirror of the metrics as TensorBoard scalars. Imported only when asked for; needs `plait[tensorboard]`."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardMirror:
    """Writes scalars with TensorBoard's own event writer, so that this needs neither torch nor tensorflow."""

    def __init__(self, folder: Path, last_step: int | None):
        """last_step: of the run that is resumed, None for a new one; what was shown after it is withdrawn."""
        self._writer = EventFileWriter(str(folder))
        if last_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=last_step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """One event with all values of a record; those that were not finite are left out."""
        scalars = [Summary.Value(tag=name, simple_value=v) for name, v in values.items() if v is not None]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
