"""The Open Inference Protocol (KServe v2) with Triton's generate extension."""
