"""Train drafters for a target: draft models, Medusa, EAGLE-3 and DFlash heads, early exits.

A *recipe* (one small file per kind under `recipes/`) defines the trained module and the loss;
`trainer.train` runs any recipe. The package needs only torch, transformers and safetensors.
"""
