"""Steps as CUDA graphs: static inputs, capture, replay."""
