"""The CUDA backend: compile, allocate, capture, replay. The only place that imports CUDA."""
