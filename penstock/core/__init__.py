"""Scheduling without tensors: requests, the step protocol, block pool, radix tree, scheduler. Never imports torch."""
