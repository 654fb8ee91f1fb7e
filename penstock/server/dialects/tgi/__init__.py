"""The dialect of Text Generation Inference."""
