"""The torch.distributed backend."""
