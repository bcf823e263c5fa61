"""The torch.distributed backend."""

# First of all, since the end of torch's import is that of our pg.py, which must find no module half done.
import torch as _torch  # noqa: F401
