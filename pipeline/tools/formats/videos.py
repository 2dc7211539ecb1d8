"""Frames of video files, by PyAV (extra ``video``), one after the other: a file is decoded once, from its beginning,
and no more than the frames that the decoder itself needs are held.

Pixels are what PyAV makes of a frame as RGB of 8 bits, whatever the codec kept of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.errors import Damaged
from pipeline.store.files import open_plain
from pipeline.tools.formats.extras import needed

TOLERANCE = 1e-4
"""Seconds by which the time of a frame may be another one than was asked for; LeRobot allows as much."""
# Only what holds its frames itself: a playlist would have other files opened, or a network.
_CONTAINERS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm"}


def video_module(form: str) -> Any:
    """Return ``av``.

    Raises:
        ConfigError: it is not installed.
    """
    return needed("av", form, "tools,video")


class Video:
    """Gives the frames of a file that are shown at times which rise. Where one lies before the last one, the file is
    decoded from its beginning once more."""

    def __init__(self, av: Any, path: str) -> None:
        self._av, self.path = av, path
        self._frames: Iterator[Any] = iter(())
        self._shown: Any = None
        self._next: Any = None

    def frame_at(self, seconds: float, shape: tuple[int, int], where: str) -> np.ndarray:
        """Return the frame that is shown at a time, [height, width, 3] uint8.

        Args:
            seconds: from the beginning of the file.
            shape: height and width that it must have.
            where: what is asked for, for errors.

        Raises:
            Damaged: there is none, or of another size, or the file is missing or cannot be decoded.
        """
        # LeRobot keeps times as float32: those of long files lie between two of them.
        allowed = TOLERANCE + float(np.spacing(np.float32(abs(seconds))))
        if self._shown is None or seconds < self._shown.time - allowed:
            self._begin(where)
        while self._next is not None and abs(self._next.time - seconds) < abs(self._shown.time - seconds):
            self._shown, self._next = self._next, self._decoded(where)
        if not abs(self._shown.time - seconds) < allowed:  # of a time that is NaN, too
            ended = "the video ends" if self._next is None else "the nearest one is"
            raise Damaged(
                f"{self.path}: has no frame at {seconds:.4f} s, where {where} is: {ended} at {self._shown.time:.4f} s. "
                "Fetch the file again, or record the episode anew"
            )
        size = self._shown.height, self._shown.width
        if size != shape:
            raise Damaged(f"{self.path}: {where} is {list(size)} pixels, where {list(shape)} is said")
        pixels: np.ndarray = self._shown.to_ndarray(format="rgb24")
        return pixels

    def close(self) -> None:
        """Close the file."""
        frames, self._frames, self._shown, self._next = self._frames, iter(()), None, None
        if hasattr(frames, "close"):
            frames.close()

    def _begin(self, where: str) -> None:
        self.close()
        self._frames = self._all()
        self._shown = self._decoded(where)
        if self._shown is None:
            raise Damaged(f"{self.path}: has no frame at all, where {where} is; fetch the file again")
        self._next = self._decoded(where)

    def _decoded(self, where: str) -> Any:
        """Return the next frame; None: there is no more."""
        try:
            return next(self._frames, None)
        except FileNotFoundError:
            raise Damaged(f"{self.path}: is missing, and {where} is in it; fetch the folder of videos too") from None
        except (self._av.FFmpegError, _Broken, OSError) as error:
            raise Damaged(f"{self.path}: cannot be decoded, where {where} is ({error}); fetch it again") from None

    def _all(self) -> Iterator[Any]:
        with open_plain(self.path) as file, self._av.open(file, container_options=_CONTAINERS) as container:
            if not container.streams.video:
                raise _Broken("no video is in it")
            stream = container.streams.video[0]
            # Decoders make up what they cannot read, of frames as of a file that is cut, and say nothing.
            stream.codec_context.options = {"err_detect": "explode"}
            for packet in container.demux(stream):
                if packet.is_corrupt:
                    raise _Broken("its end is missing")
                for frame in packet.decode():
                    if frame.time is None:
                        raise _Broken("a frame has no time")
                    yield frame


class _Broken(ValueError):
    """A file that holds other than a video does."""
