"""Folders whose matrices are quantised: `quantization_config` says how."""
