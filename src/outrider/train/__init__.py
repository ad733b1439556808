"""Train drafters for a target: draft models, Medusa, EAGLE-3 and DFlash heads, early exits.

A *recipe* (one small file per kind under `recipes/`) says what is trained and by which loss;
`trainer.train` runs any recipe. Everything here needs only torch, transformers and safetensors.
"""
