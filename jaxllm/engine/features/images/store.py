"""Which rows of the device's store belong to which image: each image is there once, as long as requests use it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from jaxllm.engine.messages import SeenImage
from jaxllm.errors import EngineDeadError, InvalidRequestError


@dataclass(eq=False)
class StoredImage:
    """An image's rows, which its `owner` fills.

    Attributes:
        users: requests that hold it.
        filled: rows of its first tiles for which the tower's work has been enqueued.
        owner: the request that has it encoded, until it is whole; None if another must take over.
        is_forgotten: nobody finds it any more.
    """

    rows: Int[np.ndarray, "R"]
    users: int = 0
    filled: int = 0
    owner: object | None = None
    is_forgotten: bool = False

    @property
    def is_whole(self) -> bool:
        return self.filled == len(self.rows)


@dataclass(kw_only=True, eq=False)
class Waiter:
    """A request for which a thread waits, and the images that it holds."""

    held: list[StoredImage] = field(default_factory=list)
    is_over: bool = False


@dataclass
class RowStore:
    """`capacity` rows. Images that nobody uses stay until their rows are needed, the longest unused first.

    Threads that prepare requests wait here: for room, and for an image that another request has encoded.
    """

    capacity: int
    num_encoded: int = 0
    num_found: int = 0
    num_held: int = 0
    closed: bool = False
    _images: OrderedDict[bytes, StoredImage] = field(default_factory=OrderedDict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._free = list(range(self.capacity - 1, -1, -1))
        self._turns: list[object] = []

    def take(self, images: Sequence[SeenImage], user: Waiter) -> None:
        """Have `user` hold all of these images, new ones with rows to be filled; waits until there is room.

        Those who wait are served in the order in which they came, so that nobody is passed by for ever. Raises
        EngineDeadError: the request is over meanwhile.
        """
        wanted = {image.digest: image.num_rows for image in images}
        if sum(wanted.values()) > self.capacity:
            raise InvalidRequestError(f"the images have {sum(wanted.values())} rows; there is room for {self.capacity}")
        with self._changed:
            self._turns.append(user)
            try:
                self._changed.wait_for(lambda: self._is_over(user) or (self._turns[0] is user and self._has(wanted)))
                self._check(user)
                user.held = [self._hold(image) for image in images]
                self.num_held += len(user.held)
            finally:
                self._turns.remove(user)
                self._changed.notify_all()

    def claim(self, image: StoredImage, user: Waiter) -> bool:
        """The request is to fill the image's rows; False once they are filled. Waits while another one fills them."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(user) or image.is_whole or image.owner in (None, user))
            self._check(user)
            if not image.is_whole:
                image.owner = user
            return not image.is_whole

    def wait(self, image: StoredImage, count: int, user: Waiter) -> None:
        """Wait until the work for the first `count` of the image's rows has been enqueued."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(user) or image.filled >= count)
            self._check(user)

    def fill(self, image: StoredImage, count: int) -> None:
        """The work for the first `count` rows of an image has been enqueued."""
        with self._changed:
            image.filled = count
            self.num_encoded += image.is_whole
            self._changed.notify_all()

    def give_back(self, user: Waiter) -> None:
        """A request is over and holds nothing any longer; another one may have to fill what it has not."""
        with self._changed:
            user.is_over = True
            held, user.held = user.held, []
            self.num_held -= len(held)
            for image in held:
                image.users -= 1
                if image.owner is user and not image.is_whole:
                    image.owner = None
                if image.is_forgotten and not image.users:
                    self._free += image.rows.tolist()
            self._changed.notify_all()

    def forget(self) -> None:
        """Later requests have their images encoded anew."""
        with self._changed:
            for digest, image in list(self._images.items()):
                image.is_forgotten = True
                if image.users:
                    del self._images[digest]
                else:
                    self._drop(digest)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _is_over(self, user: Waiter) -> bool:
        return self.closed or user.is_over

    def _check(self, user: Waiter) -> None:
        if self._is_over(user):
            raise EngineDeadError("the request was over before its images were ready")

    def _has(self, wanted: dict[bytes, int]) -> bool:
        """There are rows for all of these, now that images are dropped which nobody uses."""
        missing = sum(rows for digest, rows in wanted.items() if digest not in self._images)
        unused = [d for d, image in self._images.items() if not image.users and d not in wanted]
        for digest in unused:
            if missing <= len(self._free):
                break
            self._drop(digest)
        return missing <= len(self._free)

    def _hold(self, image: SeenImage) -> StoredImage:
        found = self._images.get(image.digest)
        if found is None:
            rows = [self._free.pop() for _ in range(image.num_rows)]
            found = self._images[image.digest] = StoredImage(np.array(rows, np.int32))
        else:
            self.num_found += 1
        self._images.move_to_end(image.digest)
        found.users += 1
        return found

    def _drop(self, digest: bytes) -> None:
        self._free += self._images.pop(digest).rows.tolist()
