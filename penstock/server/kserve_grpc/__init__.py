"""The Open Inference Protocol over gRPC: each call becomes a request to the HTTP application."""
