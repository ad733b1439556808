"""GPU code that knows no model: Triton kernels, their operations in torch, input buffers."""
