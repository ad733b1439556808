"""The GPU engine: Triton kernels, a decoder of static shapes, whole cycles on the device."""
