"""A DataLoader worker fills a mapped file in /dev/shm that is larger than what is free there."""

import mmap
import os
import tempfile

from torch import Tensor
from torch.utils.data import DataLoader


class Mapped:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            size = 2 * os.fstatvfs(file.fileno()).f_bavail * 4096
            file.truncate(size)
            with mmap.mmap(file.fileno(), size) as mapped:
                for place in range(0, size, 4096):
                    mapped[place] = 1
        raise AssertionError(f"{size} bytes fitted, sample {index}")


list(DataLoader(Mapped(), num_workers=1))
